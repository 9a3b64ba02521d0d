"""The subset of a fleet that serves a run: pure, so each worker is asked what it would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from conveyor.domain.model import DispatchableRun
from conveyor.domain.run_waits import LaneReport, RunWaitReason, WorkerReport
from conveyor.engine import subset as module
from conveyor.engine.subset import (
    LONGEST_SPAN,
    PATIENCE,
    RANKED,
    READ_TOGETHER,
    REPORT_EVERY,
    REST,
    RunSubset,
    SubsetOptions,
    _scores,
)

SLOTS = 50
LEAST = 8
GRACE = 25.0
TURN = 10.0


def run(name: str, *, limit: int = 100) -> DispatchableRun:
    return DispatchableRun(
        run_id=name, job_id=f"job-{name}", priority=5, max_inflight=limit, created_at=0
    )


class Fleet:
    """Workers that hear each other's reports at every turn; `lanes` are told in the next ones."""

    def __init__(self, workers: int, *, least: int = LEAST) -> None:
        self.now = 1_000.0
        self.least = least
        self.subsets: dict[str, RunSubset] = {}
        self.lanes: dict[str, tuple[LaneReport, ...]] = {}
        self.in_use: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.stopping: set[str] = set()
        self.paused_since: int | None = None
        self.slots: dict[str, int] = {}
        self.served: dict[str, set[str]] = {}
        self._said: dict[str, WorkerReport] = {}
        for number in range(workers):
            self.join(f"w{number}")

    def join(self, name: str, *, slots: int = SLOTS) -> None:
        self.slots[name] = slots
        self.subsets[name] = RunSubset(
            SubsetOptions(worker_id=name, slots=slots, least=self.least, grace=GRACE)
        )

    def report(self, name: str) -> WorkerReport:
        return WorkerReport(
            worker_id=name,
            version="0",
            started_at=0,
            said_at=round((self.now + self.ahead(name)) * 1_000),
            heartbeat=10.0,
            slots=self.slots[name],
            paused_since=self.paused_since,
            stopping=name in self.stopping,
            in_use=self.in_use[name],
            lanes=self.lanes.get(name, ()),
        )

    def ahead(self, name: str) -> float:
        """Return the seconds by which the clock of a worker is ahead: they differ by minutes."""
        return 97.0 * (int(name.removeprefix("w")) % 7) if name.startswith("w") else 0.0

    def say(self, name: str) -> None:
        """Let a worker write its report."""
        self._said[name] = self.report(name)

    def turn(self, runs: Iterable[DispatchableRun], *, deaf: Iterable[str] = ()) -> None:
        """Let all but the deaf hear all reports; the silent ones' stay as they were."""
        self.now += TURN
        for name in self.subsets:
            if name not in self.silent or name not in self._said:
                self.say(name)
        for name, subset in self.subsets.items():
            if name not in deaf:
                subset.hear(list(self._said.values()), self.now)
        self.share_out(runs)

    def share_out(self, runs: Iterable[DispatchableRun]) -> None:
        runs = list(runs)
        for name, subset in self.subsets.items():
            subset.moves(self.now)
            self.served[name] = {
                one.run_id for one in runs if subset.note(one, self.now, is_news=False)
            }

    def serving(self, one: DispatchableRun) -> set[str]:
        return {
            name
            for name, served in self.served.items()
            if name not in self.silent and one.run_id in served
        }

    def attend(self, one: DispatchableRun, **fields: object) -> None:
        """Let all that serve a run tell of calls for it."""
        told = {"in_flight": 5, "calling": 5, **fields}
        for name in self.serving(one):
            others = [lane for lane in self.lanes.get(name, ()) if lane.run_id != one.run_id]
            lane = LaneReport(run_id=one.run_id, **told)  # type: ignore[arg-type]
            self.lanes[name] = (*others, lane)

    def settle(self, runs: list[DispatchableRun]) -> None:
        """Hear each other, and leave to others what is theirs."""
        for _ in range(2 + round(REST / TURN)):
            self.turn(runs)
            for one in runs:
                self.attend(one)


def settled(workers: int, runs: list[DispatchableRun]) -> Fleet:
    fleet = Fleet(workers)
    fleet.settle(runs)
    return fleet


def test_a_fleet_that_a_run_needs_serves_it_whole() -> None:
    runs = [run(f"r{number}") for number in range(20)]
    fleet = settled(LEAST, runs)

    assert all(fleet.serving(one) == set(fleet.subsets) for one in runs)


@pytest.mark.slow
def test_a_run_is_served_by_as_many_as_use_its_limit_twice_over() -> None:
    few, many = run("few", limit=100), run("many", limit=1_000)
    fleet = settled(100, [few, many])

    assert len(fleet.serving(few)) == LEAST
    assert len(fleet.serving(many)) == 2 * 1_000 / SLOTS


@pytest.mark.slow
def test_runs_are_spread_evenly() -> None:
    runs = [run(f"r{number}") for number in range(200)]
    fleet = Fleet(50)
    fleet.turn([])
    fleet.turn(runs)

    lanes = Counter(name for one in runs for name in fleet.serving(one))
    mean = LEAST * len(runs) / 50
    assert sum(lanes.values()) == LEAST * len(runs)
    assert min(lanes[name] for name in fleet.subsets) > mean / 2.5
    assert max(lanes.values()) < 2 * mean


@pytest.mark.slow
def test_a_worker_that_comes_moves_only_what_becomes_its_own() -> None:
    runs = [run(f"r{number}") for number in range(50)]
    fleet = settled(30, runs)
    before = {one.run_id: fleet.serving(one) for one in runs}

    fleet.join("new")
    fleet.settle(runs)

    moved = 0
    for one in runs:
        after = fleet.serving(one)
        assert after == before[one.run_id] or (
            "new" in after and len(after - before[one.run_id]) == 1
        )
        moved += "new" in after
    assert 0 < moved < 3 * LEAST * len(runs) / 31


@pytest.mark.slow
def test_a_worker_that_goes_moves_only_what_was_its_own() -> None:
    runs = [run(f"r{number}") for number in range(50)]
    fleet = settled(30, runs)
    before = {one.run_id: fleet.serving(one) for one in runs}

    fleet.silent.add("w7")
    fleet.settle(runs)

    for one in runs:
        stayed = before[one.run_id] - {"w7"}
        after = fleet.serving(one)
        assert stayed <= after
        assert len(after) == LEAST
        assert "w7" in before[one.run_id] or after == before[one.run_id]


def test_a_worker_that_comes_is_joined_before_anybody_leaves() -> None:
    one = run("r")
    fleet = settled(30, [one])
    before = fleet.serving(one)
    for number in range(100):
        fleet.join(f"new{number}")
    fleet.turn([one])

    assert before < fleet.serving(one)


@pytest.mark.slow
def test_a_subset_that_dies_is_replaced_within_ten_seconds_and_a_turn() -> None:
    one = run("r")
    fleet = settled(100, [one])
    fleet.silent |= fleet.serving(one)

    fleet.now -= TURN - PATIENCE + 0.1
    fleet.turn([one])
    assert fleet.serving(one) == set(), "its workers are still believed"
    fleet.turn([one])
    assert len(fleet.serving(one)) >= LEAST
    fleet.settle([one])
    assert len(fleet.serving(one)) == LEAST


def test_the_old_word_of_a_dead_worker_does_not_bring_it_back() -> None:
    one = run("r")
    fleet = settled(20, [one])
    fleet.silent |= fleet.serving(one)
    fleet.turn([one])
    for _ in range(10):
        fleet.turn([one])
        fleet.attend(one)
        assert len(fleet.serving(one)) >= LEAST


@pytest.mark.parametrize("seen", [0, 1, 5, 20])
def test_views_that_differ_leave_no_run_to_nobody(seen: int) -> None:
    """Each worker hears only some of the others, and never the same ones."""
    runs = [run(f"r{number}") for number in range(20)]
    fleet = Fleet(30)
    names = list(fleet.subsets)
    for turn in range(12):
        fleet.now += TURN
        for place, name in enumerate(names):
            heard = [names[(place + 1 + step + turn) % len(names)] for step in range(seen)]
            fleet.subsets[name].hear([fleet.report(other) for other in heard], fleet.now)
        fleet.share_out(runs)
        for one in runs:
            assert len(fleet.serving(one)) >= LEAST
            fleet.attend(one)


def test_a_fleet_that_cannot_be_seen_stays_as_it_was() -> None:
    one = run("r")
    fleet = settled(30, [one])
    before = fleet.serving(one)
    fleet.now += 20 * PATIENCE
    for subset in fleet.subsets.values():
        subset.excuse()
    fleet.silent = set(fleet.subsets)  # nobody could say a word meanwhile
    fleet.turn([one])
    fleet.silent = set()

    assert fleet.serving(one) == before


def test_reports_that_a_store_lost_may_come_back() -> None:
    one = run("r")
    fleet = settled(30, [one])
    before = fleet.serving(one)
    fleet.now += PATIENCE / 2
    for subset in fleet.subsets.values():
        subset.hear([], fleet.now)
    fleet.share_out([one])
    assert fleet.serving(one) == before


def test_a_run_that_nobody_attends_to_is_open_to_all_after_ten_seconds() -> None:
    """Its workers live and say so, yet none has a lane for it."""
    one = run("r")
    fleet = settled(30, [one])
    assert len(fleet.serving(one)) == LEAST
    fleet.lanes.clear()

    fleet.turn([one])
    assert fleet.serving(one) == set(fleet.subsets)
    for _ in range(round(REST / TURN) + 2):
        fleet.attend(one)
        fleet.turn([one])
    assert len(fleet.serving(one)) == LEAST


@pytest.mark.parametrize(
    "fields",
    [
        {"in_flight": 0, "calling": 0, "empty": True},
        {"in_flight": 0, "calling": 0, "reason": RunWaitReason.PERMITS_CLOSED},
        {"in_flight": 1, "calling": 1},
    ],
)
def test_a_run_that_waits_for_something_else_is_not_opened(fields: dict[str, object]) -> None:
    one = run("r")
    fleet = settled(30, [one])
    for _ in range(5):
        fleet.attend(one, **fields)
        fleet.turn([one])
    assert len(fleet.serving(one)) == LEAST


def test_a_queue_that_was_empty_for_long_is_left_alone_until_there_is_news() -> None:
    one = run("r")
    fleet = settled(30, [one])
    fleet.attend(one, in_flight=0, calling=0, empty=True)
    fleet.turn([one])
    fleet.lanes.clear()  # let go
    for _ in range(5):
        fleet.turn([one])
    served = fleet.serving(one)
    assert len(served) == LEAST

    for subset in fleet.subsets.values():
        subset.note(one, fleet.now, is_news=True)
    fleet.share_out([one])
    assert fleet.serving(one) == served
    for _ in range(5):
        fleet.turn([one])
    assert fleet.serving(one) == set(fleet.subsets), "nobody took it up again"


def test_a_run_that_is_new_is_left_to_its_subset_until_it_can_have_been_heard() -> None:
    fleet = settled(30, [run("old")])
    one = run("new")
    fleet.share_out([one])
    assert len(fleet.serving(one)) == LEAST
    for _ in range(2):
        fleet.turn([one])
        assert len(fleet.serving(one)) == LEAST
    fleet.attend(one)
    fleet.turn([one])
    assert len(fleet.serving(one)) == LEAST


def test_workers_with_free_slots_join_a_run_that_waits_for_slots() -> None:
    one = run("r", limit=100)
    fleet = settled(30, [one])
    base = fleet.serving(one)
    for name in base:
        fleet.in_use[name] = SLOTS
    fleet.attend(one, in_flight=1, calling=1, reason=RunWaitReason.SLOTS)
    full = sorted(set(fleet.subsets) - base)[:15]
    for name in full:
        fleet.in_use[name] = SLOTS

    fleet.turn([one])
    joined = fleet.serving(one) - base
    assert 1 <= len(joined) <= 3, "as many as lack"
    assert not joined & set(full)


def test_a_full_fleet_does_not_widen_its_subsets() -> None:
    one = run("r", limit=100)
    fleet = settled(30, [one])
    base = fleet.serving(one)
    fleet.in_use.update(dict.fromkeys(fleet.subsets, SLOTS))
    fleet.attend(one, in_flight=1, calling=1, reason=RunWaitReason.SLOTS)
    fleet.turn([one])
    assert fleet.serving(one) == base


def test_free_workers_join_however_low_they_rank() -> None:
    one = run("r", limit=8)
    fleet = settled(100, [one])
    order = [name for _, name in sorted(_scores("r", fleet.subsets), reverse=True)]
    base, free = fleet.serving(one), set(order[-20:])
    fleet.in_use.update(dict.fromkeys(order[:-20], SLOTS))
    fleet.attend(one, in_flight=0, calling=0, reason=RunWaitReason.SLOTS)
    fleet.turn([one])
    joined = fleet.serving(one) - base
    assert joined == {order[-20]}, "the first that has room, and no more than lack"
    assert joined <= free


def test_a_worker_keeps_the_order_of_a_few_of_many_workers() -> None:
    """Of each run; a fleet of a thousand serves thousands of runs."""
    one = run("r", limit=100)
    fleet = settled(100, [one])
    kept = {len(subset._entries["r"].ranked) for subset in fleet.subsets.values()}
    assert kept == {RANKED * LEAST}


def test_workers_with_few_slots_cover_a_limit_by_their_number() -> None:
    one = run("r", limit=1_000)
    fleet = Fleet(0)
    for number in range(60):
        fleet.join(f"w{number}", slots=1)
    fleet.join("big", slots=1_000)
    fleet.settle([one])
    assert fleet.serving(one) == set(fleet.subsets)


def test_a_fleet_that_is_paused_keeps_its_subsets() -> None:
    runs = [run(f"r{number}") for number in range(10)]
    fleet = settled(30, runs)
    before = {one.run_id: fleet.serving(one) for one in runs}
    fleet.paused_since = 1
    for one in runs:
        fleet.attend(one, in_flight=0, calling=0)
    for _ in range(6):
        fleet.turn(runs)
    fleet.paused_since = None
    for _ in range(4):
        assert {one.run_id: fleet.serving(one) for one in runs} == before
        fleet.turn(runs)
    assert fleet.serving(runs[0]) == set(fleet.subsets), "nobody took it up again"


def test_a_subset_that_stops_is_replaced_before_its_calls_have_ended() -> None:
    one = run("r")
    fleet = settled(30, [one])
    base = fleet.serving(one)
    fleet.attend(one, in_flight=1, calling=1)
    fleet.stopping |= base
    fleet.turn([one])
    assert len(fleet.serving(one) - base) == LEAST


def test_a_run_without_work_is_forgotten() -> None:
    one = run("r")
    fleet = settled(30, [one])
    for subset in fleet.subsets.values():
        subset.forget("r")
        assert subset.known() == []
        assert subset.elsewhere() == []
        assert subset.moves(fleet.now) == ([], [])


def reports(workers: int, *, lanes: int, said_at: int = 0) -> list[WorkerReport]:
    """The reports of a fleet, in which each worker has so many lanes."""
    return [
        WorkerReport(
            worker_id=f"w{number}",
            version="0",
            started_at=0,
            said_at=said_at,
            heartbeat=10.0,
            slots=SLOTS,
            in_use=0,
            lanes=tuple(LaneReport(run_id=f"r{(number + lane) % 50}") for lane in range(lanes)),
        )
        for number in range(workers)
    ]


@pytest.mark.parametrize(
    ("workers", "lanes", "looks"), [(100, 8, 60), (400, 8, 60), (1_000, 8, 12), (3_000, 8, 10)]
)
def test_what_all_workers_read_of_each_other_is_bounded(
    workers: int, lanes: int, looks: int
) -> None:
    subset = RunSubset(SubsetOptions(worker_id="w0", slots=SLOTS, least=LEAST, grace=GRACE))
    told = reports(workers, lanes=lanes)
    heard = 0
    for turn in range(60):  # ten minutes of looks
        if subset.is_due(turn * TURN):
            heard += 1
            subset.hear(told, turn * TURN)
    assert heard == looks
    by_all = workers * heard * workers * (1 + lanes)
    # The first look comes at once, however large the fleet, and one in LONGEST_SPAN.
    once = workers * workers * (1 + lanes)
    assert by_all / 600 <= max(READ_TOGETHER, once / LONGEST_SPAN) + once / 600


def test_a_large_fleet_keeps_its_subsets_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = run("r")
    fleet = settled(30, [one])
    base = fleet.serving(one)
    monkeypatch.setattr(module, "READ_TOGETHER", 20)  # a look each 57 s
    fleet.turn([one])
    for _ in range(5):
        fleet.turn([one], deaf=fleet.subsets)
        assert not any(subset.is_due(fleet.now) for subset in fleet.subsets.values())
        assert fleet.serving(one) == base
    fleet.turn([one])
    assert fleet.serving(one) == base


def test_a_large_fleet_takes_over_at_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    one = run("r")
    fleet = settled(30, [one])
    monkeypatch.setattr(module, "READ_TOGETHER", 20)
    fleet.turn([one])
    fleet.silent |= fleet.serving(one)
    turns = 0
    while not fleet.serving(one):
        deaf = [name for name, subset in fleet.subsets.items() if not subset.is_due(fleet.now)]
        fleet.turn([one], deaf=deaf)
        turns += 1
    assert turns <= 7, "the time between two looks, and a turn"


def test_a_last_word_between_two_looks_is_as_old_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that differ by minutes do not matter, and those that live stay as they were."""
    one = run("r")
    fleet = settled(30, [one])
    monkeypatch.setattr(module, "READ_TOGETHER", 20)  # a look each 57 s
    fleet.turn([one])
    base = fleet.serving(one)
    fleet.now += REPORT_EVERY
    for name in base:
        fleet.say(name)
    fleet.now -= REPORT_EVERY
    fleet.silent |= base
    for _ in range(6):
        deaf = [
            name for name, subset in fleet.subsets.items() if not subset.is_due(fleet.now + TURN)
        ]
        fleet.turn([one], deaf=deaf)
    assert not deaf, "the second look"
    assert len(fleet.serving(one)) >= LEAST
    assert all(
        subset._others.keys() | {name} == fleet.subsets.keys() - base
        for name, subset in fleet.subsets.items()
        if name not in base
    )


def test_the_largest_fleets_are_looked_at_each_minute() -> None:
    fleet = Fleet(3)
    subset = fleet.subsets["w0"]
    lanes = (LaneReport(run_id="r", calling=0),) * 500
    fleet.lanes = dict.fromkeys(fleet.subsets, lanes)
    subset.hear([fleet.report(name) for name in fleet.subsets] * 400, fleet.now)
    assert not subset.is_due(fleet.now + LONGEST_SPAN - 1)
    assert subset.is_due(fleet.now + LONGEST_SPAN)
