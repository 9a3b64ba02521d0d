"""Lanes: one queue each, with all that the dispatcher knows of it.

Only the dispatcher's own coroutines touch a lane, between two awaits, so it needs no lock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from anyio import CancelScope

from conveyor.domain.hosts import Politeness
from conveyor.domain.model import DispatchableRun, WaitReason
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, host_queue, run_queue

NEUTRAL_PRIORITY = 5
THROTTLE_FACTOR = 0.7
THROTTLE_PAUSE = 1.0
TASK_SECONDS_WEIGHT = 0.2
"""Weight of the latest task in the running mean of task times."""
LOST_FOR = 10.0
"""Seconds for which a queue counts as lost after it was last missing, unless it gives messages: a
young one may seem to be there and empty in between."""
MOST_INSTANTS = 4_000
"""Instants that are told apart of those until which rows of a run are put off."""
EXACT_INSTANTS = 1_000
"""Of these, the ones that are kept as they are; the others are rounded down to whole seconds."""


class Owner:
    """The caller of lanes, whose share of the slots they divide among themselves.

    `busy` is the sum of theirs; `turn` is the latest one of a lane that was picked. Its share has
    the `weight` of the heaviest of its `lanes`; where those differ in weight, and it `is_mixed`, of
    those alone that have work (`weight_of_work`).
    """

    __slots__ = ("busy", "caller", "is_mixed", "lanes", "turn", "weight")

    def __init__(self, caller: str = "") -> None:
        self.caller = caller
        self.busy = 0
        self.turn = 0
        self.weight = 1.0
        self.is_mixed = False
        self.lanes: set[Lane] = set()

    def add(self, lane: Lane) -> None:
        """Have one more lane."""
        self.is_mixed = self.is_mixed or (bool(self.lanes) and lane.weight != self.weight)
        self.weight = max(self.weight, lane.weight) if self.lanes else lane.weight
        self.lanes.add(lane)

    def remove(self, lane: Lane) -> None:
        """Have one lane less."""
        self.lanes.discard(lane)
        self._weigh()

    def weight_of_work(self, eligible: Callable[[Lane], bool]) -> float:
        """Return the weight of the heaviest lane that has messages in hand, or that is `eligible`
        and not known to be empty; of all lanes if none has work."""
        weight = 0.0
        for lane in self.lanes:
            if lane.weight > weight and (
                not lane.only_waits or (not lane.empties and eligible(lane))
            ):
                weight = lane.weight
        return weight or self.weight

    def _weigh(self) -> None:
        weights = {lane.weight for lane in self.lanes}
        self.weight = max(weights, default=1.0)
        self.is_mixed = len(weights) > 1


class RunShare:
    """The share of the lanes of one run in the calls of its job, as this worker sees it.

    `busy` is the sum of theirs; `turn` is the latest one of a lane that was picked. The job allows
    `limit`, and its `ceiling` is lower while its gateway refuses for load. Slots are kept free for
    `expected` messages of its slow hosts.
    """

    __slots__ = ("busy", "ceiling", "expected", "limit", "throttled_at", "turn")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ceiling = float(limit)
        self.busy = self.expected = 0
        self.turn = 0
        self.throttled_at = -math.inf


class Lane:
    """One queue and its state.

    `is_control` tells the control lane, which needs no permits. `owner` is the caller of its
    run, `share` that of its run, which all its lanes have together. A lane with a `host` holds
    the tasks of that one alone; `politeness` is what the run asks for.

    `busy` counts messages asked for, waiting for a slot or in work; `unsettled` those of them whose
    call has ended; `admitted` those that hold a permit. `kept` counts messages in hand beside
    those: their calls have ended and their permits are back, or they wait for their host. `turned`
    are those of them whose host has come free; `waiting` counts all that wait for it, here or with
    a permit. `buffer` holds messages received beyond the permits, each with the moment it came;
    `refilling` counts those asked for to fill it. `scopes` are the calls under way. `empties`
    counts empty receives in a row, since `empty_since`; the latest one of a lane that `has_given`
    brought messages. The lane of a host is `looking` while its queue is asked without a slot or a
    permit; one that `waits_in_hand` for its starts is asked in no other way. The lane is not polled
    before `not_before`; its queue is lost since `lost_since`, if it is, and was last missing at
    `lost_at`.
    All moments are monotonic seconds. A closed lane ends with its last message. The queue of a
    `dropped` lane is gone, or going, because its run has ended. A claim that was being made when
    `withdrawals` grew is given up.
    """

    __slots__ = (
        "_busy",
        "admitted",
        "buffer",
        "calm_until",
        "closed",
        "dropped",
        "empties",
        "empty_since",
        "has_given",
        "host",
        "is_control",
        "job_id",
        "kept",
        "looking",
        "lost_at",
        "lost_since",
        "not_before",
        "owner",
        "politeness",
        "probing",
        "queue",
        "refilling",
        "run_id",
        "scopes",
        "share",
        "task_seconds",
        "task_spread",
        "turn",
        "turned",
        "unsettled",
        "waiting",
        "waits_in_hand",
        "weight",
        "withdrawals",
    )

    def __init__(
        self,
        *,
        queue: str,
        run_id: str,
        job_id: str,
        limit: int,
        priority: int,
        owner: Owner | None = None,
        share: RunShare | None = None,
    ) -> None:
        self.queue = queue
        self.is_control = queue == CONTROL_QUEUE
        self.run_id = run_id
        self.job_id = job_id
        self.share = share or RunShare(limit)
        self.host = ""
        self.politeness: Politeness | None = None
        self.weight = 2.0 ** ((priority - NEUTRAL_PRIORITY) / 2)
        self.owner = owner or Owner()
        self.owner.add(self)
        self._busy = 0
        self.unsettled = 0
        self.kept = 0
        self.turned: deque[Delivery] = deque()
        self.waiting = 0
        self.admitted = 0
        self.buffer: deque[tuple[Delivery, float]] = deque()
        self.refilling = 0
        self.scopes: set[CancelScope] = set()
        self.task_seconds = self.task_spread = 0.0
        self.empties = 0
        self.empty_since: float | None = None
        self.lost_since: float | None = None
        self.lost_at = -math.inf
        self.calm_until = 0.0
        self.not_before = 0.0
        self.turn = 0
        self.probing = self.looking = self.has_given = self.waits_in_hand = False
        self.withdrawals = 0
        self.closed = False
        self.dropped = False

    @property
    def busy(self) -> int:
        """The messages asked for, waiting for a slot or in work."""
        return self._busy

    @busy.setter
    def busy(self, count: int) -> None:
        change = count - self._busy
        self.owner.busy += change
        self.share.busy += change
        self._busy = count

    @property
    def limit(self) -> int:
        """The calls in flight that the job allows."""
        return self.share.limit

    @property
    def ceiling(self) -> float:
        """The limit of the job, lowered while the gateway throttles it."""
        return self.share.ceiling

    @property
    def throttled_at(self) -> float:
        """The moment at which the gateway last refused for load."""
        return self.share.throttled_at

    @property
    def room(self) -> int:
        """The number of further messages that the job's limit allows, lowered while the gateway
        throttles the job."""
        share = self.share
        return min(share.limit, int(share.ceiling)) - share.busy

    @property
    def idle(self) -> bool:
        """True if this worker holds no message of the lane and has asked for no more."""
        return not (self.busy or self.kept or self.buffer or self.refilling or self.looking)

    @property
    def is_looked_at(self) -> bool:
        """True if the queue of a host is to be asked with neither permit nor start: it is not known
        to hold a message, or others might use the start if it holds none."""
        return bool(self.host) and (self.waits_in_hand or not self.has_given)

    @property
    def only_waits(self) -> bool:
        """True if this worker holds no message of the lane, though it may wait on the queue."""
        probes = 1 if self.probing else 0
        return self.busy == probes and not (self.kept or self.buffer or self.refilling)

    def poll_now(self) -> None:
        """Forget that the queue was empty, because there may be work."""
        self.empties = 0
        self.empty_since = None
        self.not_before = 0.0

    def found(self) -> None:
        """Note that a receive brought messages."""
        self.empties = 0
        self.empty_since = self.lost_since = None
        self.has_given = True

    def found_nothing(self, now: float, *, empties_before: int) -> None:
        """Note that a receive brought nothing. Slots that asked at the same time count it once."""
        if now - self.lost_at >= LOST_FOR:
            self.lost_since = None
        self.empties = min(self.empties, empties_before) + 1
        self.has_given = False
        if self.empty_since is None:
            self.empty_since = now

    def lost(self, now: float) -> None:
        """Note that the queue is missing."""
        self.lost_at = now
        if self.lost_since is None:
            self.lost_since = now

    def took(self, seconds: float) -> None:
        """Note how long one of its tasks took, and by how much that is off the mean."""
        if self.task_seconds:
            off = abs(seconds - self.task_seconds)
            self.task_spread += TASK_SECONDS_WEIGHT * (off - self.task_spread)
            self.task_seconds += TASK_SECONDS_WEIGHT * (seconds - self.task_seconds)
        else:
            self.task_seconds = seconds

    def rest_until(self, until: float) -> None:
        """Poll the queue no earlier than then."""
        self.not_before = until

    def throttle(self, now: float) -> None:
        """Lower the ceiling (multiplicative decrease), at most once a second, after the gateway
        refused for load."""
        share = self.share
        if now - share.throttled_at >= THROTTLE_PAUSE:
            share.throttled_at = now
            share.ceiling = max(1.0, min(share.ceiling, share.busy) * THROTTLE_FACTOR)

    def succeed(self) -> None:
        """Raise the ceiling (additive increase): by one for each ceiling's worth of answers."""
        share = self.share
        if share.ceiling < share.limit:
            share.ceiling = min(float(share.limit), share.ceiling + 1.0 / share.ceiling)


class PutOffRows:
    """The rows of a run that this worker left until later, counted by the instant at which they
    are due and the reason; None is another's claim. It outlives the lane, whose queue may be empty
    meanwhile. Beyond EXACT_INSTANTS, rows are counted by the second, and beyond MOST_INSTANTS to
    the last instant before they are due."""

    __slots__ = ("_by_instant",)

    def __init__(self) -> None:
        self._by_instant: dict[float, Counter[WaitReason | None]] = {}

    def add(self, now: float, due: float, why: WaitReason | None) -> None:
        """Note that a row is left until `due`."""
        # Rounded down: a row must not count any more once it may be tried and put off again.
        instant = due if len(self._by_instant) < EXACT_INSTANTS else float(math.floor(due))
        if instant not in self._by_instant and len(self._by_instant) >= MOST_INSTANTS:
            self.forget_due(now)
            if len(self._by_instant) >= MOST_INSTANTS:
                before = (one for one in self._by_instant if one <= due)
                instant = max(before, default=now)
        self._by_instant.setdefault(instant, Counter())[why] += 1

    def remove(self, due: float, why: WaitReason | None) -> None:
        """Note that a row is left until then no more."""
        for instant in (due, float(math.floor(due))):
            if self._by_instant.get(instant, Counter[WaitReason | None]())[why] > 0:
                self._by_instant[instant][why] -= 1
                if not self._by_instant[instant].total():
                    del self._by_instant[instant]
                return

    def forget_due(self, now: float) -> None:
        """Forget the rows that are due."""
        for instant in [instant for instant in self._by_instant if instant <= now]:
            del self._by_instant[instant]

    def by_reason(self) -> Counter[WaitReason | None]:
        """Count the rows by reason."""
        return sum(self._by_instant.values(), Counter[WaitReason | None]())

    @property
    def first_due(self) -> float | None:
        """The moment at which the first row is due."""
        return min(self._by_instant, default=None)


class Lanes:
    """The control lane, and for each run that may have work one lane of its own, which holds the
    tasks of all hosts without one, and one for each of its hosts that have a queue.

    `put_off` holds the rows that were left until later, by run; `elsewhere` returns the runs with
    work that other workers serve."""

    def __init__(self, *, control_limit: int) -> None:
        self.control = Lane(
            queue=CONTROL_QUEUE, run_id="", job_id="", limit=control_limit, priority=9
        )
        self._runs: dict[str, list[Lane]] = {}
        self._owners: dict[str, Owner] = {}
        self.put_off: dict[str, PutOffRows] = {}
        self.elsewhere: Callable[[], Iterable[DispatchableRun]] = tuple

    def __iter__(self) -> Iterator[Lane]:
        return chain.from_iterable(self._runs.values())

    def get(self, run_id: str) -> Lane | None:
        """Return the lane of a run's own queue."""
        lanes = self._runs.get(run_id)
        return lanes[0] if lanes else None

    def of(self, run_id: str) -> list[Lane]:
        """Return the lanes of a run: that of its own queue, and those of its hosts, by number."""
        return self._runs.get(run_id, [])

    def empty_since(self, moment: float) -> list[str]:
        """Return the runs whose queues have been empty since then, with no message in hand."""
        return [
            run_id
            for run_id, lanes in self._runs.items()
            if all(
                lane.empty_since is not None and lane.empty_since <= moment and lane.only_waits
                for lane in lanes
            )
        ]

    def put_off_row(self, run_id: str, now: float, due: float, why: WaitReason | None) -> None:
        """Note that a row of a run is left until `due`."""
        self.put_off.setdefault(run_id, PutOffRows()).add(now, due, why)

    def hasten_row(self, run_id: str, now: float, due: float, sooner: float) -> None:
        """Note that a row that was left until `due` for the limits of its host is left until
        `sooner`; not at all, if that is now."""
        if run_id in self.put_off:
            self.put_off[run_id].remove(due, WaitReason.HOST_LIMIT)
            if sooner > now:
                self.put_off_row(run_id, now, sooner, WaitReason.HOST_LIMIT)

    def runs(self) -> Iterable[list[Lane]]:
        """Return the lanes of each run."""
        return self._runs.values()

    def has_all(self, run: DispatchableRun) -> bool:
        """Tell whether each queue of a run has an open lane."""
        lanes = self._runs.get(run.run_id, [])
        return len(lanes) > len(run.hosts) and not lanes[0].closed

    def open(self, run: DispatchableRun) -> Lane:
        """Make or refresh the lanes of a run that may have work, and poll them at once. Return that
        of its own queue."""
        lanes = self._runs.setdefault(run.run_id, [])
        share = lanes[0].share if lanes else RunShare(run.max_inflight)
        for number in range(len(lanes) - 1, len(run.hosts)):
            queue = run_queue(run.run_id) if number < 0 else host_queue(run.run_id, number)
            lane = Lane(
                queue=queue,
                run_id=run.run_id,
                job_id=run.job_id,
                limit=run.max_inflight,
                priority=run.priority,
                owner=self._owners.setdefault(run.caller, Owner(run.caller)),
                share=share,
            )
            lane.host = "" if number < 0 else run.hosts[number]
            lane.politeness = run.politeness
            lanes.append(lane)
        for lane in lanes:
            lane.closed = False
            lane.poll_now()
        return lanes[0]

    def close(self, run_id: str) -> list[Lane]:
        """Receive no more for a run; return its lanes."""
        lanes = self.of(run_id)
        for lane in lanes:
            lane.closed = True
        return lanes

    def forget(self, run_id: str) -> None:
        """Remove the closed lanes of a run that have no message left."""
        for lane in self._runs.pop(run_id, ()):
            lane.owner.remove(lane)
            if not lane.owner.lanes:
                del self._owners[lane.owner.caller]

    def serving(self) -> list[str]:
        """Return the runs that have open lanes."""
        return [run_id for run_id, lanes in self._runs.items() if not lanes[0].closed]

    def missing_from(self, run_ids: Iterable[str]) -> list[str]:
        """Return the runs that have open lanes and are not in `run_ids`."""
        known = set(run_ids)
        return [run for run in self.serving() if run not in known]
