"""The scheduling of a job: its schedule, the template of its runs, and the record of its fires."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.schedule import Schedule


class Overlap(StrEnum):
    """The treatment of a fire while a run of the job is live: skipped, or kept until its end."""

    SKIP = "skip"
    WAIT = "wait"


def parse_overlap(document: Any, *, usual: Overlap) -> Overlap:
    """Read the field `overlap` of a JSON object that holds a schedule; `usual` where it is absent
    or null.

    Raises ConveyorError(invalid_argument), naming the field.
    """
    word = document.get("overlap")
    if word is None:
        return usual
    if word not in list(Overlap):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"schedule.overlap: must be {' or '.join(Overlap)}"
        )
    return Overlap(word)


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of each run: `rows` of them, staged in chunks named by their first indexes;
    `units` are the write units of all. `list_id` tells the list from one that another attempt at
    the same submit staged."""

    rows: int
    units: int
    chunks: tuple[int, ...]
    list_id: str = "0"


class Scheduling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduling of one job.

    A rate counts from `anchor`. `next_at` is the instant of the next fire, None if there is none,
    and `next_nominal` its nominal local time, both computed by the zone rules `zones_version`.
    `last_nominal` and `last_at` are the nominal time and the instant of the latest fire that was
    decided: no earlier one fires. `waiting` is the nominal time of the fire that waits for the end
    of the live run (Overlap.WAIT), empty if none does, and `waiting_at` its instant. `look_at` is
    set if a worker is to look at the job then, and not at `next_at`. `key_hash` is the caller's
    line in the file of API keys. Instants are in milliseconds since the epoch.
    """

    schedule: Schedule
    template: Template
    anchor: int
    overlap: Overlap = Overlap.SKIP
    paused: bool = False
    next_at: int | None = None
    next_nominal: str = ""
    last_nominal: str = ""
    last_at: int = 0
    waiting: str = ""
    waiting_at: int = 0
    look_at: int | None = None
    zones_version: str = ""
    key_hash: str = ""

    @property
    def due_at(self) -> int | None:
        """The instant of the next look at the job; None if there is nothing to look for."""
        return self.next_at if self.look_at is None else self.look_at

    @property
    def is_over(self) -> bool:
        """True for a single `at` that has fired: nothing waits, and no fire follows."""
        return self.schedule.at is not None and self.due_at is None and not self.waiting


class FireStatus(StrEnum):
    """The outcome of a fire: it made a run, was skipped, or passed while nobody looked."""

    STARTED = "started"
    SKIPPED = "skipped"
    MISSED = "missed"


class SkipReason(StrEnum):
    """The reason for which a fire made no run."""

    PAUSED = "paused"
    RUN_LIVE = "run_live"
    QUOTA_EXCEEDED = "quota_exceeded"
    KEY_UNREADABLE = "key_unreadable"
    TOO_LATE = "too_late"


class FireRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of the record: one fire, or `count` of them in a row that were skipped for one reason
    or missed together.

    `fire_id` is a ULID; ids grow with each row. `nominal` and `instant` are of the first of them,
    `last_nominal` and `last_instant` of the last one. `run_id` names the run of a started one. All
    instants are in milliseconds since the epoch; `noted_at` is the last change of the row.
    """

    fire_id: str
    status: FireStatus
    nominal: str
    instant: int
    last_nominal: str
    last_instant: int
    noted_at: int
    count: int = 1
    reason: SkipReason | None = None
    run_id: str | None = None
