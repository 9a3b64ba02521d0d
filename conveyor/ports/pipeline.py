"""The pipeline ports: what a binding offers so that many tasks share the cost of one.

A binding whose store takes many tasks in one operation offers a `Pipeline`. Its workers claim tasks
a receive at a time, ahead of their slots, and settle what has been answered together. Without a
pipeline, each task is claimed and settled by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conveyor.ports.blobs import NewBodies
from conveyor.ports.tasks import TaskBatches


class CallLedger(Protocol):
    """Notes of the gateway calls under way, which survive a kill of the process.

    At the next start they tell claims whose call had begun from claims that had only waited. A
    claim that carries `life` in front of its worker's name belongs to this ledger.
    """

    @property
    def life(self) -> str:
        """The name of this opening of the ledger."""
        ...

    def begin(self, run_id: str, task_id: str, claim_number: int) -> int:
        """Note that the call under a claim begins; return the number of the note. Never waits."""
        ...

    def end(self, note: int) -> None:
        """Remove a note, once the end of its claim is durable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Operations on many tasks, and the ledger of calls. One operation claims at most
    `claims_at_once` tasks."""

    claims_at_once: int
    tasks: TaskBatches
    bodies: NewBodies
    calls: CallLedger
