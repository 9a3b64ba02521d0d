"""Lanes: one queue each, with what the dispatcher knows of it.

Only the dispatcher's own coroutines touch a lane, between two awaits, so no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conveyor.domain.model import DispatchableRun
from conveyor.ports.queues import CONTROL_QUEUE, run_queue

NEUTRAL_PRIORITY = 5
THROTTLE_FACTOR = 0.7
THROTTLE_PAUSE = 1.0


class Lane:
    """One queue and its state.

    `busy` counts messages asked for, waiting or worked; `permits` those of the fleet's permits that
    this worker holds for the job. `empties` counts empty receives in a row; `not_before` keeps the
    lane from being polled until then (monotonic seconds). A closed lane ends with its last message.
    """

    __slots__ = (
        "busy",
        "ceiling",
        "closed",
        "cool_until",
        "empties",
        "growing",
        "job_id",
        "limit",
        "misses",
        "not_before",
        "permits",
        "probing",
        "queue",
        "run_id",
        "throttled_at",
        "weight",
    )

    def __init__(self, *, queue: str, run_id: str, job_id: str, limit: int, priority: int) -> None:
        self.queue = queue
        self.run_id = run_id
        self.job_id = job_id
        self.limit = limit
        self.weight = 2.0 ** ((priority - NEUTRAL_PRIORITY) / 2)
        self.ceiling = float(limit)
        self.busy = 0
        self.permits = 0
        self.empties = 0
        self.misses = 0
        self.not_before = 0.0
        self.cool_until = 0.0
        self.throttled_at = 0.0
        self.growing = False
        self.probing = False
        self.closed = False

    @property
    def is_control(self) -> bool:
        """Whether this is the control lane, which needs no permits."""
        return self.queue == CONTROL_QUEUE

    @property
    def room(self) -> int:
        """How many more messages the job's limit, lowered while it is throttled, leaves room
        for."""
        return min(self.limit, int(self.ceiling)) - self.busy

    def throttle(self, now: float) -> None:
        """Multiplicative decrease, at most once a second, after the gateway refused for load."""
        if now - self.throttled_at >= THROTTLE_PAUSE:
            self.throttled_at = now
            self.ceiling = max(1.0, min(self.ceiling, self.busy) * THROTTLE_FACTOR)

    def succeed(self) -> None:
        """Additive increase: one more at a time for each ceiling's worth of answers."""
        if self.ceiling < self.limit:
            self.ceiling = min(float(self.limit), self.ceiling + 1.0 / self.ceiling)


class Lanes:
    """The control lane and one lane a run that may have work."""

    def __init__(self, *, control_limit: int) -> None:
        self.control = Lane(
            queue=CONTROL_QUEUE, run_id="", job_id="", limit=control_limit, priority=9
        )
        self._runs: dict[str, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._runs.values())

    def get(self, run_id: str) -> Lane | None:
        """The lane of a run."""
        return self._runs.get(run_id)

    def open(self, run: DispatchableRun) -> Lane:
        """The lane of a run that may have work, made or refreshed; it is polled at once."""
        lane = self._runs.get(run.run_id)
        if lane is None:
            lane = Lane(
                queue=run_queue(run.run_id),
                run_id=run.run_id,
                job_id=run.job_id,
                limit=run.max_inflight,
                priority=run.priority,
            )
            self._runs[run.run_id] = lane
        lane.closed = False
        lane.empties = 0
        lane.not_before = 0.0
        return lane

    def close(self, run_id: str) -> Lane | None:
        """Receive no more for a run; the lane, where there was one."""
        lane = self._runs.get(run_id)
        if lane is not None:
            lane.closed = True
        return lane

    def forget(self, lane: Lane) -> None:
        """Drop a closed lane with no message left."""
        self._runs.pop(lane.run_id, None)

    def missing_from(self, run_ids: Iterable[str]) -> list[str]:
        """Runs with an open lane that are not among `run_ids`."""
        known = set(run_ids)
        return [run for run, lane in self._runs.items() if not lane.closed and run not in known]
