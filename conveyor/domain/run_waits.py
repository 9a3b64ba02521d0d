"""The reasons why a live run waits, in the order in which they are told, and the choice among them.

The run itself says whether it is paused or still being written. All else is known from the workers,
each of which says once a heartbeat what keeps it from calling more for each of its runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from conveyor.domain.model import Run, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES

SILENT_AFTER = 3
"""Heartbeats without a word after which a worker counts as gone."""
STALE_AFTER = 2
"""Heartbeats after which a word is told as an old one."""


FLEET_PAUSED = "the fleet is paused by an operator: nothing new starts"
"""The detail of every run that waits while the fleet is paused."""

FOR_WANT_OF = "calls fail for want of the "
"""The beginning of the detail of every run that waits during an outage."""


class RunWaitReason(StrEnum):
    """The one reason that is told is the first of these that holds."""

    PAUSED = "paused"
    INGESTING = "ingesting"
    NO_WORKER = "no_worker"
    QUEUE_LOST = "queue_lost"
    PERMITS_CLOSED = "permits_closed"
    BODIES_NOT_KEPT = "bodies_not_kept"
    GATEWAY_THROTTLED = "gateway_throttled"
    HOST_CLOSED = "host_closed"
    RETRY_BACKOFF = "retry_backoff"
    CLAIMS_HELD = "claims_held"
    MAX_INFLIGHT = "max_inflight"
    SLOTS = "slots"


class RunWait(msgspec.Struct, frozen=True, kw_only=True):
    """The first reason that holds for which a live run waits, and the `others`.

    `since` and `until` are in milliseconds since the epoch; `until` is None where nobody knows.
    """

    reason: RunWaitReason
    since: int
    detail: str
    until: int | None = None
    others: tuple[RunWaitReason, ...] = ()


class LaneReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One run as one worker sees it.

    `in_flight` counts the messages in hand, `calling` the calls under way for them, `buffered`
    those that wait here for a permit, `put_off` the rows that the worker left until later. The job
    allows `limit` calls at a time, of which `ceiling` are left while its gateway refuses for load.
    `empty` tells that the queue had no message to give when it was last asked. `caller_limit` is
    that of all calls of the job's caller, where it is the one that is reached. `hosts` are some
    with a queue of their own, the busiest, with the calls under way to each.
    `reason` is what keeps the worker from calling more for it, since `since` and, where it is
    known, until `until`, in milliseconds since the epoch.
    """

    run_id: str
    in_flight: int = 0
    calling: int = 0
    buffered: int = 0
    put_off: int = 0
    permits: int = 0
    limit: int = 0
    ceiling: int = 0
    reason: RunWaitReason | None = None
    since: int = 0
    until: int | None = None
    empty: bool = False
    caller_limit: int = 0
    hosts: dict[str, int] = {}


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One worker's word about itself at `said_at`, in milliseconds since the epoch.

    It says one each `heartbeat` seconds, and its claims last for `claim_seconds` from then on.
    `in_use` of its `slots` make a call. `away` names what all its work waits for. `lanes_left_out`
    counts the lanes that had no room. `paused_since` is the instant of an operator's order that
    nothing new starts, if the worker heard one. A worker that is `stopping` takes up nothing.
    """

    worker_id: str
    version: str
    started_at: int
    said_at: int
    heartbeat: float
    slots: int
    in_use: int
    claim_seconds: float = 0.0
    away: tuple[str, ...] = ()
    lanes: tuple[LaneReport, ...] = ()
    lanes_left_out: int = 0
    paused_since: int | None = None
    stopping: bool = False

    def is_silent(self, now: int) -> bool:
        """Tell whether the worker has said nothing for SILENT_AFTER heartbeats."""
        return self._age(now) > SILENT_AFTER

    def is_stale(self, now: int) -> bool:
        """Tell whether the report is older than STALE_AFTER heartbeats."""
        return self._age(now) > STALE_AFTER

    def is_overdue(self, now: int) -> bool:
        """Tell whether the next report should be there."""
        return self._age(now) > 1

    @property
    def kept_for(self) -> float:
        """The seconds for which a report is kept: until after the claims of its worker lapse."""
        return max(2 * SILENT_AFTER * self.heartbeat, self.claim_seconds + self.heartbeat)

    def _age(self, now: int) -> float:
        return (now - self.said_at) / (self.heartbeat * 1_000)


# Fields go without their names, since a fleet reads each report many times; new ones go to the end.
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerReport)


def encode_report(report: WorkerReport) -> bytes:
    """Encode a report, as stores keep it and as its bound counts it."""
    return _encoder.encode(report)


def decode_report(encoded: bytes) -> WorkerReport | None:
    """Decode a report; None if it is one of another version, or none at all."""
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Hold(msgspec.Struct, frozen=True):
    """A reason that holds. Not told by itself: see `RunWait`."""

    reason: RunWaitReason
    since: int
    detail: str
    until: int | None = None


Sight = tuple[WorkerReport, LaneReport]
"""A run as a worker sees it, with that worker."""


class Crew:
    """All workers as they were last heard.

    `heard_at` is the instant of the last word of all that are kept; without any, the one given,
    from which on nobody was heard. `heartbeat` is that of workers that were never heard, in
    seconds.
    """

    def __init__(self, reports: Sequence[WorkerReport], *, heard_at: int, heartbeat: float) -> None:
        self.reports = reports
        self.heard_at = max((one.said_at for one in reports), default=heard_at)
        self.heartbeat = heartbeat
        self._sights: defaultdict[str, list[Sight]] = defaultdict(list)
        for worker in reports:
            for lane in worker.lanes:
                self._sights[lane.run_id].append((worker, lane))

    def paused_since(self, now: int) -> int | None:
        """Return since when workers start nothing because an operator paused the fleet."""
        told = [one.paused_since for one in self.reports if not one.is_silent(now)]
        return min((since for since in told if since is not None), default=None)

    def sights(self, run_id: str) -> list[Sight]:
        """Return what each worker sees of a run."""
        return self._sights.get(run_id, [])

    def calls_of_others(self, run_id: str, host: str, now: int) -> int:
        """Count the calls that other runs have under way to a host of which they have a queue."""
        return sum(
            lane.hosts.get(host, 0)
            for worker in self.reports
            if not worker.is_silent(now)
            for lane in worker.lanes
            if lane.run_id != run_id
        )

    def is_gone(self, now: int) -> bool:
        """Tell whether no worker has said a word for SILENT_AFTER heartbeats."""
        if self.reports:
            return all(one.is_silent(now) for one in self.reports)
        return now - self.heard_at > SILENT_AFTER * self.heartbeat * 1_000


def run_wait(run: Run, crew: Crew | None, now: int) -> RunWait | None:
    """Return why a run waits; None for one that nothing holds back. Without a `crew`, nothing is
    known of the workers."""
    holds = _holds(run, crew, now)
    if not holds:
        return None
    by_reason = {hold.reason: hold for hold in reversed(holds)}
    first, *others = (by_reason[reason] for reason in RunWaitReason if reason in by_reason)
    return RunWait(
        reason=first.reason,
        since=first.since,
        detail=first.detail,
        until=first.until,
        others=tuple(hold.reason for hold in others),
    )


def _holds(run: Run, crew: Crew | None, now: int) -> list[Hold]:
    holds: list[Hold] = []
    if run.status not in LIVE_RUN_STATES:
        return holds
    paused_since = None if crew is None else crew.paused_since(now)
    if paused_since is not None:
        holds.append(Hold(RunWaitReason.PAUSED, paused_since, FLEET_PAUSED))
    if run.paused:
        holds.append(Hold(RunWaitReason.PAUSED, run.updated_at, "the run is paused"))
    if run.status is not RunStatus.RUNNING:
        return holds
    written = _nothing_written(run)
    if written is not None:
        holds.append(written)
    if crew is None:
        return holds
    if crew.is_gone(now):
        holds.append(_no_worker(crew))
    if written is None:
        holds += _claims_held(run, crew, now)
    if written is None and not run.paused and run.stats.completed < run.stats.total:
        holds += _held_by_workers(run, crew, now)
    return holds


def _nothing_written(run: Run) -> Hold | None:
    """Return the hold of an ingestion: the rows of a rerun are those of its source, of which nobody
    knows how many are to be worked, so that the first of them ends it."""
    ingest = run.ingest
    if ingest is None or not run.ingesting:
        return None
    ended = 0 if run.rerun_of is not None else run.stats.completed
    if ingest.next_index > ended:
        return None
    detail = f"no task is written yet that could be worked: {ingest.next_index:,} of {ingest.end:,}"
    return Hold(RunWaitReason.INGESTING, run.created_at, detail)


def _no_worker(crew: Crew) -> Hold:
    heartbeat = max((one.heartbeat for one in crew.reports), default=crew.heartbeat)
    detail = f"no worker has said a word for {SILENT_AFTER} heartbeats of {heartbeat:g} s"
    return Hold(RunWaitReason.NO_WORKER, crew.heard_at, detail)


def _claims_held(run: Run, crew: Crew, now: int) -> list[Hold]:
    """Return the hold of claims whose worker is silent."""
    rows, since, until = 0, now, 0
    for worker, lane in crew.sights(run.run_id):
        lapses = worker.said_at + round(worker.claim_seconds * 1_000)
        if worker.is_silent(now) and lane.in_flight and lapses > now:
            rows += lane.in_flight
            since, until = min(since, worker.said_at), max(until, lapses)
    if not rows:
        return []
    are = "task is" if rows == 1 else "tasks are"
    detail = f"{rows:,} {are} under claims of a worker that is silent"
    return [Hold(RunWaitReason.CLAIMS_HELD, since, detail, until)]


def _held_by_workers(run: Run, crew: Crew, now: int) -> list[Hold]:
    """Return what keeps the workers that are there from calling more."""
    workers = [one for one in crew.reports if not one.is_silent(now)]
    sights = [sight for sight in crew.sights(run.run_id) if not sight[0].is_silent(now)]
    by_reason: dict[RunWaitReason, list[Sight]] = defaultdict(list)
    for worker, lane in sights:
        if lane.reason is not None and _goes_on(worker, lane, now):
            by_reason[lane.reason].append((worker, lane))
    in_hand = sum(lane.in_flight + lane.buffered for _, lane in sights)
    left = run.stats.total - run.stats.completed - in_hand
    waits = {one: by_reason.pop(one) for one in _ALL_WAIT if one in by_reason}
    put_off = sum(lane.put_off for seen in waits.values() for _, lane in seen)
    # A row at work, or one that nobody had put off, does not wait.
    if not in_hand and put_off >= left:
        if len(waits) > 1:
            waits = {RunWaitReason.RETRY_BACKOFF: list(chain.from_iterable(waits.values()))}
        by_reason.update({reason: _at_most(left, seen) for reason, seen in waits.items()})
    if left <= 0:
        by_reason.pop(RunWaitReason.MAX_INFLIGHT, None)
    if left <= 0 or not _are_full(workers, sights):
        by_reason.pop(RunWaitReason.SLOTS, None)
    elif not sights and workers:
        unseen = LaneReport(run_id=run.run_id, since=run.created_at)
        by_reason[RunWaitReason.SLOTS] = [(one, unseen) for one in workers]
    return [_hold(reason, seen, workers, now) for reason, seen in by_reason.items()]


_ALL_WAIT = (RunWaitReason.HOST_CLOSED, RunWaitReason.RETRY_BACKOFF, RunWaitReason.CLAIMS_HELD)
"""The reasons that say of every row left that it waits."""


def _goes_on(worker: WorkerReport, lane: LaneReport, now: int) -> bool:
    """Tell whether a reason still holds. Of rows that are put off only the first is known: once it
    is due the others wait on, until the next report tells more."""
    if lane.until is None or lane.until > now:
        return True
    return lane.reason in _ALL_WAIT and not worker.is_overdue(now)


def _at_most(rows: int, seen: Sequence[Sight]) -> list[Sight]:
    """Count at most so many rows as put off: some may have ended since the reports."""
    counted = []
    for worker, lane in seen:
        put_off = min(rows, lane.put_off)
        rows -= put_off
        counted.append((worker, msgspec.structs.replace(lane, put_off=put_off)))
    return counted


def _are_full(workers: Sequence[WorkerReport], sights: Sequence[Sight]) -> bool:
    """Tell whether every slot of every worker is taken, as far as it could serve the run."""
    holding = {worker.worker_id: lane.reason for worker, lane in sights}
    return all(
        holding.get(one.worker_id, RunWaitReason.SLOTS) is RunWaitReason.SLOTS
        and one.in_use >= one.slots
        for one in workers
    )


def _hold(
    reason: RunWaitReason, seen: Sequence[Sight], workers: Sequence[WorkerReport], now: int
) -> Hold:
    detail = _DETAILS[reason](seen, workers)
    if all(worker.is_stale(now) for worker, _ in seen):
        detail += f"; so it was more than {STALE_AFTER} heartbeats ago"
    ends = [lane.until for _, lane in seen if lane.until is not None]
    since = min(lane.since for _, lane in seen)
    end = min(ends, default=0)
    return Hold(reason, since, detail, end if end > now else None)


# -- the sentences --


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _queue_lost(_seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    return "the queue of the run is missing, and is being made again"


def _permits_closed(_seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    return "the ledger of permits was begun anew, and grants nothing yet"


def _bodies_not_kept(seen: Sequence[Sight], workers: Sequence[WorkerReport]) -> str:
    of = f"{len(seen):,} of {_counted(len(workers), 'worker')}"
    return f"bodies cannot be stored, so work is held back: {of}"


def _gateway_throttled(seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    away = sorted({name for worker, _ in seen for name in worker.away if name != "result store"})
    if away:
        return f"{FOR_WANT_OF}{' and the '.join(away)}: one trial call a second of each worker"
    limit = max(lane.limit for _, lane in seen)
    calls = _counted(min(limit, sum(lane.ceiling for _, lane in seen)), "call")
    return f"the gateway refuses for load: {calls} at a time of {limit:,}"


def _host_closed(seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    rows = _counted(sum(lane.put_off for _, lane in seen), "task")
    return f"every task left waits for its host, which asked for a pause or is at a limit: {rows}"


def _retry_backoff(seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    rows = _counted(sum(lane.put_off for _, lane in seen), "task")
    return f"every task left waits for its next attempt: {rows}"


def _claimed_elsewhere(seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    rows = _counted(sum(lane.put_off for _, lane in seen), "task")
    return f"every task left is under the claim of a worker that is silent: {rows}"


def _max_inflight(seen: Sequence[Sight], _workers: Sequence[WorkerReport]) -> str:
    of_caller = max(lane.caller_limit for _, lane in seen)
    if of_caller:
        return (
            f"the cap of the caller is in use, over all of its jobs: {of_caller:,} of {of_caller:,}"
        )
    limit = max(lane.limit for _, lane in seen)
    return f"the cap is in use: {limit:,} of {limit:,}"


def _slots(seen: Sequence[Sight], workers: Sequence[WorkerReport]) -> str:
    slots, own = sum(one.slots for one in workers), sum(lane.calling for _, lane in seen)
    of = f"{_counted(slots, 'slot')} of {_counted(len(workers), 'worker')}"
    return f"every slot is taken: {of}, {own:,} of them by this run"


_DETAILS: dict[RunWaitReason, Callable[[Sequence[Sight], Sequence[WorkerReport]], str]] = {
    RunWaitReason.QUEUE_LOST: _queue_lost,
    RunWaitReason.PERMITS_CLOSED: _permits_closed,
    RunWaitReason.BODIES_NOT_KEPT: _bodies_not_kept,
    RunWaitReason.GATEWAY_THROTTLED: _gateway_throttled,
    RunWaitReason.HOST_CLOSED: _host_closed,
    RunWaitReason.RETRY_BACKOFF: _retry_backoff,
    RunWaitReason.CLAIMS_HELD: _claimed_elsewhere,
    RunWaitReason.MAX_INFLIGHT: _max_inflight,
    RunWaitReason.SLOTS: _slots,
}
