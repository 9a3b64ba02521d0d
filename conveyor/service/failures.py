"""Failure groups of a run: shows them, and reads and checks the groups that a request names."""

from __future__ import annotations

from collections.abc import Collection

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.failure_groups import MOST_GROUPS, OTHER_GROUP, FailureGroups, group_filter
from conveyor.domain.model import GroupFilter, TaskStatus
from conveyor.ports.tasks import TaskReader
from conveyor.service.context import Context
from conveyor.service.responses import failures_body
from conveyor.service.schemas import FailuresBody


class Failures:
    """Reads the failed tasks of runs by kind."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def of_run(self, caller_id: str, job_id: str, run_id: str | None) -> FailuresBody:
        """Return the failure groups of a run, of the latest where `run_id` is None.

        Raises ConveyorError(not_found).
        """
        _, run = await self._context.live_run(caller_id, job_id, run_id)
        return failures_body(run.run_id, await _groups(self._context.tasks, run.run_id))


def parse_groups(
    text: str | None, statuses: Collection[TaskStatus] | None
) -> frozenset[str] | None:
    """Parse a comma list of failure groups, which goes with the status `failed` alone.

    Raises ConveyorError(invalid_argument).
    """
    if text is None:
        return None
    groups = frozenset(word.strip() for word in text.split(","))
    if "" in groups or len(groups) > MOST_GROUPS + 1:
        raise _invalid(f"must be a comma list of 1 to {MOST_GROUPS + 1} failure groups")
    if statuses is None or set(statuses) != {TaskStatus.FAILED}:
        raise _invalid("needs status=failed")
    return groups


async def known_groups(tasks: TaskReader, run_id: str, wanted: frozenset[str]) -> GroupFilter:
    """Choose the tasks of the wanted groups of a run.

    Raises ConveyorError: no_matching_tasks if the run lacks one of the groups; not_found.
    """
    found = await _groups(tasks, run_id)
    kept = [group.group_id for group in found.groups]
    known = {*kept, OTHER_GROUP} if found.other else set(kept)
    if not wanted <= known:
        raise ConveyorError(
            ErrorCode.NO_MATCHING_TASKS, "group: the run has no failed task of such a group"
        )
    return group_filter(wanted, kept)


async def _groups(tasks: TaskReader, run_id: str) -> FailureGroups:
    found = await tasks.failure_groups(run_id)
    if found is None:
        raise not_found("run")
    return found


def _invalid(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"group: {problem}")
