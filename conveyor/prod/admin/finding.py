"""What a check found of one thing, and how a refusal of AWS reads there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.refusals import told as told

MADE = "made"
"""What became of a thing that was not there at all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing, and what is wrong with it; None: nothing."""

    what: str
    problem: str | None = None

    def __str__(self) -> str:
        return (
            f"ok      {self.what}"
            if self.problem is None
            else f"WRONG   {self.what}: {self.problem}"
        )


async def tried(what: str, attempt: Callable[[], Awaitable[str | None]]) -> Finding:
    """The finding of an attempt, which says what is wrong, or is refused."""
    try:
        return Finding(what, await attempt())
    except AwsRefused as refused:
        return Finding(what, told(refused))
    except ConveyorError as error:
        return Finding(what, error.detail)
