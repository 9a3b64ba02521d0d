"""The reports of a worker: who it is, and what keeps it from calling more for each of its runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import msgspec

from conveyor.aio.outages import Outage, Outages
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import WaitReason
from conveyor.domain.run_waits import LaneReport, RunWaitReason, WorkerReport, encode_report
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.lanes import Lane, PutOffRows
from conveyor.engine.policy import Policy
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Shared
from conveyor.ports.workers import MOST_BYTES, MOST_LANES, Workers

THROTTLED_FOR = 10.0
"""Seconds after a refusal for load for which a job counts as slowed down, whatever its ceiling."""
SAME_INSTANT = 500
"""Milliseconds by which two instants may differ that were read off two clocks, and be the same."""
MOST_HOSTS = 16
"""Hosts of a run that a report tells of."""
LAST_WORD = 2.0
"""Most seconds that the end of a worker waits for the removal of its report."""

_OF_HOSTS = (WaitReason.HOST_RETRY_AFTER, WaitReason.HOST_LIMIT)
_ASKED = (*_OF_HOSTS, WaitReason.RETRY_AFTER)

_log = logging.getLogger("conveyor.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReporterOptions:
    """A worker as it names itself: its id, version, heartbeat, slots and length of claims. It
    reports each `every` seconds, at most its heartbeat. All times are in seconds."""

    worker_id: str
    version: str
    heartbeat: float
    every: float
    slots: int
    claim_seconds: float


class _Reason(NamedTuple):
    """The reason that keeps a lane, with its begin and end in monotonic seconds. The begin is None
    where this look was the first that found it."""

    reason: RunWaitReason
    since: float | None = None
    until: float | None = None


class Reported(NamedTuple):
    """The parts of a worker that a report is about."""

    dispatcher: Dispatcher
    policy: Policy
    outages: Outages


class WorkerReporter:
    """Says, at the start and once a heartbeat, what a dispatcher does."""

    def __init__(
        self, about: Reported, workers: Workers, clock: Clock, options: ReporterOptions
    ) -> None:
        self._dispatcher, self._policy, self._outages = about
        self._workers = workers
        self._clock = clock
        self._options = options
        self._started_at = clock.now()
        self._told_last: dict[str, LaneReport] = {}

    async def run(self) -> None:
        """Say a report now and at each interval, until cancelled. One that fails is logged, and
        changes nothing else."""
        while True:
            await log_and_continue(_log, "the report of this worker failed", self._say)
            await self._clock.sleep(self._options.every)

    async def leave(self) -> None:
        """Remove the report, at a good end."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_WORD):
            await log_and_continue(_log, "the report of this worker was not removed", self._leave)

    async def _say(self) -> None:
        await self._workers.say(self.report())

    async def _leave(self) -> None:
        await self._workers.leave(self._options.worker_id)

    def report(self) -> WorkerReport:
        """Look at all lanes and build a report of at most MOST_LANES and MOST_BYTES."""
        now, wall = self._clock.monotonic(), self._clock.now()
        away = self._outages.now()
        lanes = [self._run(of_run, away, now, wall) for of_run in self._dispatcher.lanes.runs()]
        seen = {lane.run_id for lane in lanes}
        put_off = self._dispatcher.lanes.put_off
        for run_id, rows in list(put_off.items()):
            rows.forget_due(now)
            if rows.first_due is None:
                del put_off[run_id]
            elif run_id not in seen:
                # Nothing polls its queue, which was empty for long.
                reason = _put_off(rows)
                lanes.append(self._told(LaneReport(run_id=run_id), reason, rows, now, wall))
        self._told_last = {lane.run_id: lane for lane in lanes if lane.reason is not None}
        return _bounded(self._whole(away, wall), lanes)

    def _whole(self, away: Sequence[Outage], wall: int) -> WorkerReport:
        options = self._options
        return WorkerReport(
            worker_id=options.worker_id,
            version=options.version,
            started_at=self._started_at,
            said_at=wall,
            heartbeat=options.heartbeat,
            slots=options.slots,
            in_use=self._dispatcher.calling,
            claim_seconds=options.claim_seconds,
            away=tuple(outage.shared.value for outage in away),
            paused_since=self._dispatcher.paused_since,
            stopping=self._dispatcher.is_stopping,
        )

    def _run(
        self, lanes: Sequence[Lane], away: Sequence[Outage], now: float, wall: int
    ) -> LaneReport:
        """Tell of the lanes of one run together, that of its own queue first."""
        lane = lanes[0]
        rows = self._dispatcher.lanes.put_off.get(lane.run_id)
        if rows is not None:
            rows.forget_due(now)
        permits = self._policy.state(lane, now)
        waiting = sum(one.waiting for one in lanes if not one.host)
        seen = LaneReport(
            run_id=lane.run_id,
            in_flight=max(0, sum(one.busy - one.probing for one in lanes)),
            calling=sum(len(one.scopes) for one in lanes),
            buffered=waiting + sum(len(one.buffer) + len(one.turned) for one in lanes),
            permits=permits.permits,
            limit=lane.limit,
            ceiling=min(lane.limit, int(lane.ceiling)),
            empty=all(one.empties > 0 for one in lanes),
            caller_limit=permits.caller_limit,
            hosts=_busiest(lanes),
        )
        return self._told(seen, self._reason(lanes, away, rows, now), rows, now, wall)

    def _reason(
        self, lanes: Sequence[Lane], away: Sequence[Outage], rows: PutOffRows | None, now: float
    ) -> _Reason | None:
        """Return the first reason of the list that keeps this worker from calling more."""
        lane, only_wait = lanes[0], all(one.only_waits for one in lanes)
        if lane.closed or lane.dropped:
            return _put_off(rows) if rows is not None and only_wait else None
        lost = [one.lost_since for one in lanes if one.lost_since is not None]
        if lost:
            return _Reason(RunWaitReason.QUEUE_LOST, min(lost))
        permits = self._policy.state(lane, now)
        if permits.reason is RunWaitReason.PERMITS_CLOSED:
            return _Reason(permits.reason, until=permits.until)
        for outage in sorted(away, key=lambda one: one.shared is not Shared.STORE):
            if outage.shared is Shared.STORE or self._outages.is_shut:
                keeps = outage.shared is not Shared.STORE
                reason = RunWaitReason.GATEWAY_THROTTLED if keeps else RunWaitReason.BODIES_NOT_KEPT
                return _Reason(reason, now - (self._clock.now() - outage.since) / 1_000)
        if _is_throttled(lane, rows, now):
            return _Reason(RunWaitReason.GATEWAY_THROTTLED)
        closed = self._policy.closed_until(lanes, now)
        if closed is not None and only_wait:
            return _Reason(RunWaitReason.HOST_CLOSED, until=closed)
        if all(one.empties for one in lanes):
            kept = [self._kept(one, now) for one in lanes]
            opens = [moment for some in kept if some is not None for moment in some]
            return None if None in kept else _put_off(rows, opens)
        if permits.reason is not None:
            return _Reason(permits.reason, until=permits.until)
        return _Reason(RunWaitReason.SLOTS) if self._dispatcher.is_full else None

    def _kept(self, lane: Lane, now: float) -> list[float] | None:
        """Return when the closed hosts open for which messages in hand wait; None if some do not
        wait for one."""
        waits = self._dispatcher.waits
        if lane.only_waits or waits is None:
            return [] if lane.only_waits else None
        return waits.closed_until(lane, now)

    def _told(
        self,
        seen: LaneReport,
        found: _Reason | None,
        rows: PutOffRows | None,
        now: float,
        wall: int,
    ) -> LaneReport:
        """Add to a lane what was found, since when, and until when: as it was told last, unless
        that has changed."""
        count = 0 if rows is None else rows.by_reason().total()
        if found is None:
            return msgspec.structs.replace(seen, put_off=count)
        last = self._told_last.get(seen.run_id)
        since = wall if found.since is None else wall - round((now - found.since) * 1_000)
        if last is not None and last.reason is found.reason:
            since = last.since
        until = None if found.until is None else wall + round((found.until - now) * 1_000)
        if until is not None and last is not None and last.until is not None:
            until = last.until if abs(until - last.until) < SAME_INSTANT else until
        return msgspec.structs.replace(
            seen, put_off=count, reason=found.reason, since=since, until=until
        )


def _busiest(lanes: Sequence[Lane]) -> dict[str, int]:
    """Count the calls under way to the busiest hosts that have a lane."""
    calls = Counter({lane.host: len(lane.scopes) for lane in lanes if lane.host and lane.scopes})
    return dict(calls.most_common(MOST_HOSTS))


def _is_throttled(lane: Lane, rows: PutOffRows | None, now: float) -> bool:
    """Tell whether the gateway's refusals keep a job below its limit."""
    if now - lane.throttled_at < THROTTLED_FOR:
        return True
    if int(lane.ceiling) < lane.limit and lane.room <= 0:
        return True
    return rows is not None and rows.by_reason()[WaitReason.LOAD_REFUSAL] > 0


def _put_off(rows: PutOffRows | None, opens: Sequence[float] = ()) -> _Reason | None:
    """Name the reason for which all rows that are left wait, of a run whose queue is empty. Some
    may be in hand and wait for closed hosts, which open at `opens`."""
    counts = Counter[WaitReason | None]() if rows is None else rows.by_reason()
    counts[WaitReason.HOST_RETRY_AFTER] += len(opens)
    if not counts.total():
        return None
    reason = RunWaitReason.RETRY_BACKOFF
    of_hosts = any(counts[one] for one in _OF_HOSTS)
    if of_hosts and counts.total() == sum(counts[one] for one in _ASKED):
        reason = RunWaitReason.HOST_CLOSED
    elif counts.total() == counts[None]:
        reason = RunWaitReason.CLAIMS_HELD
    due = None if rows is None else rows.first_due
    return _Reason(reason, until=min([*opens, *([] if due is None else [due])]))


def _bounded(whole: WorkerReport, lanes: list[LaneReport]) -> WorkerReport:
    """Return the report with as many lanes as it may have, the idle ones left out first; before
    any, their hosts."""
    if len(encode_report(msgspec.structs.replace(whole, lanes=tuple(lanes)))) > MOST_BYTES:
        lanes = [msgspec.structs.replace(lane, hosts={}) for lane in lanes]
    lanes.sort(key=lambda lane: (lane.reason is None, lane.in_flight == 0, lane.run_id))
    room = MOST_LANES
    while True:
        report = msgspec.structs.replace(
            whole, lanes=tuple(lanes[:room]), lanes_left_out=max(0, len(lanes) - room)
        )
        size = len(encode_report(report))
        if size <= MOST_BYTES:
            return report
        room = max(0, min(room, len(lanes)) * MOST_BYTES // size - 1)
