"""Batches of SQS: ten entries a call, each of which succeeds or fails by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.aio.concurrency import each_alone, side_by_side
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MAX_BATCH
from conveyor.prod.aws.calls import Aws
from conveyor.prod.aws.leftovers import to_the_last

MOST_CALLS = 8
"""Calls at a time of one `in_batches`: half of the threads are left to acknowledge meanwhile."""


async def in_batches(
    aws: Aws,
    clock: Clock,
    operation: str,
    url: str,
    entries: Sequence[dict[str, Any]],
    *,
    void: frozenset[str] = frozenset(),
    apart: bool = False,
) -> None:
    """Make one call for each ten entries, some side by side, and again for entries that failed.

    Failures with a code in `void` are passed over. The first call that fails for good ends all, but
    those that are `apart` are all made, and it is raised in the end. Raises ConveyorError:
    unavailable where entries still fail after all rounds, internal where one is not fit to be
    taken; AwsRefused.
    """

    async def call(some: Sequence[dict[str, Any]]) -> None:
        await _call(aws, clock, operation, url, some, void)

    pieces = [entries[start : start + MAX_BATCH] for start in range(0, len(entries), MAX_BATCH)]
    await (each_alone if apart else side_by_side)(call, pieces, at_a_time=MOST_CALLS)


async def _call(
    aws: Aws,
    clock: Clock,
    operation: str,
    url: str,
    entries: Sequence[dict[str, Any]],
    void: frozenset[str],
) -> None:
    async def make(left: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answer = await aws.call("sqs", operation, {"QueueUrl": url, "Entries": left})
        done = {one["Id"] for one in answer.get("Successful", [])}
        for failure in answer.get("Failed", []):
            if failure["Code"] in void:
                done.add(failure["Id"])
            elif failure["SenderFault"]:
                raise ConveyorError(
                    ErrorCode.INTERNAL,
                    f"sqs refuses an entry of {operation}: {failure['Code']}",
                )
        # Of what it says nothing, nothing may have been done: twice is better than never.
        return [one for one in left if one["Id"] not in done]

    numbered = [{**one, "Id": str(number)} for number, one in enumerate(entries)]
    await to_the_last(make, numbered, clock, complaint=f"sqs leaves a part of {operation} undone")
