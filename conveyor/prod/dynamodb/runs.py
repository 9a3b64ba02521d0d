"""The runs port on one DynamoDB table."""

from __future__ import annotations

from collections.abc import Callable

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import DispatchableRun, Run, RunFailure, RunStatus, TaskStatus
from conveyor.domain.states import LIVE_RUN_STATES, RUN_TRANSITIONS
from conveyor.ports.records import Answer, DispatchChange, Once, Rerun
from conveyor.prod.dynamodb.deleting import Deleting
from conveyor.prod.dynamodb.dispatch import Dispatch
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.rerun import Reruns
from conveyor.prod.dynamodb.run_listing import PIECE, runs_of
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunMoved, RunRecords
from conveyor.prod.dynamodb.run_tombstones import Tombstones
from conveyor.prod.dynamodb.views import Views


class DynamoRuns:
    """The runs port."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._views = Views(records)
        self._deleting = Deleting(records, self._views)
        self._dispatch = Dispatch(records)
        self._reruns = Reruns(records)
        self._tombstones = Tombstones(records)

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        """A run by id, deleted ones included; with None, the latest that is not deleted."""
        if run_id is None:
            latest = await self._listed(caller, job_id, below=None, limit=1, known_only=False)
            return latest[0] if latest else None
        row = await self._records.read(run_id)
        if row is None or row.caller != caller or row.run.job_id != job_id:
            return None
        return (await self._records.shown(row)).run

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Runs of a job that are not deleted, newest first; without those of a newer shape."""
        return await self._listed(caller, job_id, below=before, limit=limit, known_only=True)

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        """End the latest run as `stopped`."""

        def stop(run: Run) -> Change | None:
            if run.status is RunStatus.STOPPED:
                return None
            if RunStatus.STOPPED not in RUN_TRANSITIONS[run.status]:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_STOPPABLE, f"the latest run is {run.status} already"
                )
            return Change(status=RunStatus.STOPPED)

        return await self._move_latest(caller, job_id, stop, now=now)

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        """Set or clear the latest run's pause."""

        def pause(run: Run) -> Change | None:
            if run.status not in LIVE_RUN_STATES:
                raise ConveyorError(ErrorCode.CONFLICT, f"the latest run is {run.status} already")
            return None if run.paused is paused else Change(paused=paused)

        return await self._move_latest(caller, job_id, pause, now=now)

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        """End a live run as `failed`; True where this call did it."""
        failed = Change(
            status=RunStatus.FAILED, sets={"failure_reason": str(reason), "failure_detail": detail}
        )
        row = await self._records.read(run_id)
        if row is None:
            return False
        after = await self._records.decide(
            row, lambda known: failed if known.live else None, now=now
        )
        return after is not None

    async def rerun(
        self,
        caller: str,
        job_id: str,
        run_id: str,
        *,
        statuses: frozenset[TaskStatus] | None,
        window_start: int,
        large_from: int,
        now: int,
        answer: Callable[[Rerun], Answer],
        once: Once | None,
    ) -> Answer:
        """Make the new run `run_id` from the latest one, and close the job."""
        return await self._reruns.rerun(
            caller,
            job_id,
            run_id,
            statuses=statuses,
            window_start=window_start,
            large_from=large_from,
            now=now,
            answer=answer,
            once=once,
        )

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Turn a run to `deleted` and let the job's latest run be the newest other one."""
        await self._deleting.delete_run(caller, job_id, run_id, now=now)

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run."""
        await self._deleting.purge_run(run_id)

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Every run that is running and not paused; see `dispatch` on how fresh that is."""
        return await self._dispatch.dispatchable_runs()

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Runs whose status or pause was changed at or after `since`; see `dispatch` on how fresh
        that is."""
        return await self._dispatch.dispatch_changes(since=since)

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One run, if it is running and not paused."""
        return await self._dispatch.dispatchable_run(run_id)

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        """(job_id, run_id) of every tombstone, as far as the index knows, by run id; with `before`,
        of those that nobody has touched since, as their rows say."""
        return await self._tombstones.all(before=before)

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        """Note that the scrub of a deleted run is under way."""
        await self._tombstones.touch(run_id, now=now)

    async def _listed(
        self, caller: str, job_id: str, *, below: int | None, limit: int, known_only: bool
    ) -> list[Run]:
        found: list[Run] = []
        async for row in runs_of(
            self._records.table,
            job_id,
            below=below,
            limit=min(limit, PIECE),
            known_only=known_only,
        ):
            if row.caller != caller:
                return []
            if row.run.status is not RunStatus.DELETED:
                found.append((await self._records.shown(row)).run)
                if len(found) == limit:
                    break
        return found

    async def _move_latest(
        self, caller: str, job_id: str, decision: Callable[[Run], Change | None], *, now: int
    ) -> Run:
        """The latest run of a job after what is decided for it."""
        for _ in range(TRIES):
            row = await self._views.need_latest(caller, job_id)
            change = decision(row.run)
            if change is None:
                return row.run
            try:
                return (await self._records.change(row, change, now=now)).run
            except RunMoved:
                continue
        raise changed_too_often()
