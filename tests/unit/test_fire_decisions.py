"""Decide about the fires of a job that are due."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from conveyor.domain.errors import ConveyorError
from conveyor.domain.fires import (
    LONGEST_PAUSE,
    FireDecision,
    FireLook,
    decide_fires,
    due_fires,
    with_new_schedule,
    with_next_fire,
    with_present_zones,
    with_schedule,
    with_state,
)
from conveyor.domain.model import IngestStatus, Job, JobStatus
from conveyor.domain.schedule import (
    ZONES_VERSION,
    Calendar,
    Rate,
    Schedule,
    next_fires,
    upcoming,
)
from conveyor.domain.scheduling import (
    FireRecord,
    FireStatus,
    Overlap,
    Scheduling,
    SkipReason,
    Template,
)
from conveyor.testing.clock import START, FakeClock

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
CATCH_UP = 7 * DAY
INTERVAL = 5_000
HOURLY = Schedule(rate=Rate(1, "hour"))
NINE_IN_BERLIN = Schedule(calendar=Calendar((9,)), timezone="Europe/Berlin")
GAP_IN_BERLIN = Schedule(calendar=Calendar((2, 3)), timezone="Europe/Berlin")


class World:
    """One scheduled job, its record, and a clock of its own."""

    def __init__(self, schedule: Schedule = HOURLY, **fields: Any) -> None:
        self.clock = FakeClock()
        self.now = START
        self.rows: dict[str, FireRecord] = {}
        self.started: list[str] = []
        self.decided = 0
        scheduling = Scheduling(
            schedule=schedule,
            template=Template(rows=3, units=3, chunks=(0,), list_id="1"),
            anchor=START,
            **fields,
        )
        self.job = Job(
            job_id=self.clock.new_id(),
            caller="caller",
            status=JobStatus.CLOSED,
            created_at=START,
            updated_at=START,
            scheduling=with_next_fire(scheduling, after=START),
        )

    @property
    def scheduling(self) -> Scheduling:
        assert self.job.scheduling is not None
        return self.job.scheduling

    def change(self, **fields: Any) -> None:
        self.job = structs.replace(self.job, scheduling=structs.replace(self.scheduling, **fields))

    def look(
        self, *, is_live: bool = False, refused: SkipReason | None = None, catch_up: int = CATCH_UP
    ) -> FireDecision:
        """Decide, and keep what was decided."""
        look = self.seen(is_live=is_live, catch_up=catch_up)
        return self.keep(decide_fires(self.job, look, refused=refused))

    def put(
        self, schedule: Schedule, *, is_live: bool = False, overlap: Overlap | None = None
    ) -> FireDecision:
        """Set another schedule, as the API does."""
        overlap = overlap or self.scheduling.overlap
        look = self.seen(is_live=is_live)
        return self.keep(with_new_schedule(self.job, look, schedule, overlap=overlap))

    def seen(self, *, is_live: bool = False, catch_up: int = CATCH_UP) -> FireLook:
        """The facts that are known now."""
        return FireLook(
            now=self.now,
            is_live=is_live,
            newest=max(self.rows.values(), key=lambda row: row.fire_id, default=None),
            run_id=self.clock.new_id(),
            fire_id=self.clock.new_id(),
            catch_up=catch_up,
            interval=INTERVAL,
        )

    def keep(self, decision: FireDecision) -> FireDecision:
        """Keep what was decided."""
        assert decision.after.version == self.job.version + 1
        assert (decision.run is None) == (decision.started is None)
        if decision.started is not None:
            assert decision.started.nominal not in self.started
            self.started.append(decision.started.nominal)
        for row in decision.fires:
            if row.fire_id in self.rows:
                assert row.fire_id == max(self.rows)
            else:
                assert row.fire_id > max(self.rows, default="")
            self.rows[row.fire_id] = row
        self.decided += sum(decision.outcomes.values())
        self.job = decision.after
        return decision

    def after(self, milliseconds: int, **known: Any) -> FireDecision:
        """Decide so much later."""
        self.now += milliseconds
        return self.look(**known)

    @property
    def record(self) -> list[tuple[str, str | None, int]]:
        """The rows, oldest first: status, reason, count."""
        return [
            (row.status.value, row.reason, row.count)
            for row in sorted(self.rows.values(), key=lambda row: row.fire_id)
        ]


def test_a_fire_makes_a_run_of_the_template_and_moves_on() -> None:
    world = World(NINE_IN_BERLIN)
    decision = world.after(DAY)
    run = decision.run

    assert run is not None
    assert (run.trigger, run.run_sequence, run.stats.total) == ("scheduled", 1, 3)
    assert run.ingest is not None
    assert (run.ingest.status, run.ingest.template, run.ingest.end) == (
        IngestStatus.PENDING,
        True,
        3,
    )
    assert (run.ingest.chunks, run.ingest.list_id) == ((0,), "1")
    assert (decision.after.latest_run_id, decision.after.run_count) == (run.run_id, 1)
    [row] = decision.fires
    assert (row.nominal, row.last_nominal, row.run_id) == (
        "2026-01-01T09:00:00",
        "2026-01-01T09:00:00",
        run.run_id,
    )
    assert world.scheduling.last_nominal == "2026-01-01T09:00:00"
    assert world.scheduling.next_nominal == "2026-01-02T09:00:00"
    assert world.scheduling.due_at == world.scheduling.next_at


def test_a_single_time_fires_once_and_is_over() -> None:
    world = World(Schedule(at="2026-01-01T12:00", timezone="UTC"))
    assert world.after(12 * HOUR).run is not None
    assert world.scheduling.is_over
    assert world.scheduling.due_at is None
    world.now -= 3 * HOUR
    assert world.look().run is None


def test_of_several_missed_the_newest_one_runs() -> None:
    world = World()
    decision = world.after(5 * HOUR + MINUTE)
    assert decision.started is not None
    assert decision.started.instant == START + 5 * HOUR
    assert world.record == [("missed", None, 4), ("started", None, 1)]
    missed = decision.fires[0]
    assert (missed.instant, missed.last_instant) == (START + HOUR, START + 4 * HOUR)
    assert decision.outcomes == {"missed": 4, "started": 1}


def test_one_that_is_too_late_is_missed_with_the_others() -> None:
    world = World(Schedule(rate=Rate(10, "day")))
    assert world.after(11 * DAY + 1, catch_up=DAY).run is None
    assert world.record == [("missed", "too_late", 1)]
    late = World(Schedule(rate=Rate(10, "day")))
    assert late.after(11 * DAY, catch_up=DAY).run is not None


def test_a_year_of_minutes_is_counted_and_not_gone_through() -> None:
    world = World(Schedule(rate=Rate(1, "minute")))
    year = 365 * DAY
    world.now += year
    due = due_fires(world.scheduling, now=world.now)
    assert due is not None
    assert due.newest.instant == START + year
    assert due.earlier is not None
    assert due.earlier.count == year // MINUTE - 1
    assert due.earlier.last.instant == START + year - MINUTE


def test_pauses_are_one_row_and_the_next_one_fires() -> None:
    world = World(paused=True)
    for _ in range(3):
        assert world.after(HOUR).run is None
    world.after(2 * HOUR)
    assert world.record == [("skipped", "paused", 5)]
    [row] = world.rows.values()
    assert (row.instant, row.last_instant) == (START + HOUR, START + 5 * HOUR)
    world.change(paused=False)
    assert world.after(1).run is None, "resuming fires nothing by itself"
    assert world.after(HOUR).run is not None


def test_a_state_that_is_there_already_decides_about_no_fire() -> None:
    world = World(HOURLY)
    due_at = world.scheduling.next_at
    assert due_at is not None
    world.now = due_at + 1

    for paused in (False, True, True):
        decision = world.keep(with_state(world.job, world.seen(), paused=paused))
        assert (decision.run, decision.fires) == (None, ())
        assert (world.scheduling.paused, world.scheduling.next_at) == (paused, due_at)
    resumed = world.keep(with_state(world.job, world.seen(), paused=False))
    assert [(row.status, row.reason) for row in resumed.fires] == [
        (FireStatus.SKIPPED, SkipReason.PAUSED)
    ]


def test_reasons_that_differ_are_rows_of_their_own() -> None:
    world = World()
    world.after(HOUR, is_live=True)
    world.after(HOUR, is_live=True)
    world.after(HOUR, refused=SkipReason.QUOTA_EXCEEDED)
    world.after(HOUR, refused=SkipReason.KEY_UNREADABLE)
    world.after(HOUR)
    world.after(HOUR, is_live=True)
    assert world.record == [
        ("skipped", "run_live", 2),
        ("skipped", "quota_exceeded", 1),
        ("skipped", "key_unreadable", 1),
        ("started", None, 1),
        ("skipped", "run_live", 1),
    ]


def test_one_fire_waits_for_the_end_of_the_run() -> None:
    world = World(overlap=Overlap.WAIT)
    assert world.after(HOUR, is_live=True).run is None
    assert world.scheduling.waiting_at == START + HOUR
    assert world.record == []
    world.after(HOUR, is_live=True)
    assert world.record == [("skipped", "run_live", 1)]
    started = world.after(MINUTE).started
    assert started is not None
    assert started.instant == START + HOUR
    assert not world.scheduling.waiting
    assert world.scheduling.due_at == START + 3 * HOUR


def test_a_wait_is_looked_at_again_and_again_but_ever_more_seldom() -> None:
    world = World(Schedule(rate=Rate(1, "day")), overlap=Overlap.WAIT)
    world.after(DAY, is_live=True)
    pauses = []
    while world.now < START + 2 * DAY - MINUTE:
        due_at = world.scheduling.due_at
        assert due_at is not None
        pauses.append(due_at - world.now)
        world.now = due_at
        world.look(is_live=True)
    assert pauses[0] == INTERVAL
    assert pauses[:-1] == sorted(pauses[:-1])
    assert max(pauses) == LONGEST_PAUSE
    assert len(pauses) < 1_500


def test_a_fire_that_comes_due_as_the_run_ends_takes_the_place_of_the_one_that_waits() -> None:
    world = World(overlap=Overlap.WAIT)
    world.after(HOUR, is_live=True)
    started = world.after(3 * HOUR).started
    assert started is not None
    assert started.instant == START + 4 * HOUR
    assert not world.scheduling.waiting
    assert world.record == [("missed", None, 1), ("missed", None, 2), ("started", None, 1)]


def test_a_fire_that_waits_is_too_late_if_nobody_looked_and_not_if_the_run_was_long() -> None:
    away = World(Schedule(rate=Rate(300, "day")), overlap=Overlap.WAIT)
    away.after(300 * DAY, is_live=True)
    assert away.after(CATCH_UP + MINUTE, is_live=True).run is None
    assert away.record == [("missed", "too_late", 1)]
    assert not away.scheduling.waiting

    busy = World(Schedule(rate=Rate(300, "day")), overlap=Overlap.WAIT)
    busy.after(300 * DAY, is_live=True)
    for _ in range(20):
        busy.after(DAY, is_live=True)
    assert busy.after(MINUTE).run is not None


def test_a_fire_that_waits_too_late_gives_way_to_one_that_is_not() -> None:
    world = World(Schedule(rate=Rate(1, "day")), overlap=Overlap.WAIT)
    world.after(DAY, is_live=True)
    started = world.after(10 * DAY + MINUTE).started
    assert started is not None
    assert started.instant == START + 11 * DAY
    assert world.record == [("missed", "too_late", 1), ("missed", None, 9), ("started", None, 1)]


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_fire_that_a_change_kept_is_too_late_after_the_bound(overlap: Overlap) -> None:
    """Workers are away all along, and no run is ever live."""
    world = World(overlap=overlap)
    world.now += HOUR
    world.put(Schedule(rate=Rate(300, "day")))
    assert world.scheduling.waiting
    assert world.after(20 * DAY).run is None
    assert world.record == [("missed", "too_late", 1)]


def test_a_newer_fire_takes_the_place_of_one_that_a_change_kept() -> None:
    world = World(Schedule(rate=Rate(15, "minute")))
    world.now += 16 * MINUTE
    world.put(HOURLY)
    started = world.after(2 * HOUR).started
    assert started is not None
    assert started.instant == START + 16 * MINUTE + 2 * HOUR
    assert world.record == [("missed", None, 1), ("missed", None, 1), ("started", None, 1)]


def test_of_two_changes_before_a_look_the_newest_fire_is_kept() -> None:
    world = World(Schedule(rate=Rate(15, "minute")))
    world.now += 16 * MINUTE
    world.put(Schedule(rate=Rate(1, "minute")))
    world.now += 150_000
    world.put(HOURLY)
    newest = START + 18 * MINUTE
    assert (world.scheduling.waiting_at, world.scheduling.due_at) == (newest, newest)
    assert world.record == [("missed", None, 1), ("missed", None, 1)]
    started = world.after(1).started
    assert started is not None
    assert started.instant == newest


def test_a_change_while_a_run_is_live_leaves_the_fire_that_waits_for_its_end() -> None:
    world = World(overlap=Overlap.WAIT)
    world.after(HOUR, is_live=True)
    world.now += HOUR
    world.put(Schedule(rate=Rate(1, "day")), is_live=True)
    assert world.scheduling.waiting_at == START + HOUR
    assert world.record == [("skipped", "run_live", 1)]


def test_a_time_that_comes_again_after_the_clock_was_set_back_is_refused_in_right_words() -> None:
    world = World()
    world.after(3 * HOUR)
    again = Schedule(at="2026-01-01T02:00", timezone="UTC")
    with pytest.raises(ConveyorError, match=r"than the latest .* decided, 2026-01-01T03:00:00"):
        with_schedule(world.scheduling, again, now=START + HOUR)
    with pytest.raises(ConveyorError, match="at: has passed"):
        with_schedule(world.scheduling, again, now=START + 3 * HOUR)


GONE = Schedule(calendar=Calendar((9,)), timezone="Mars/Olympus")


def test_a_schedule_of_a_zone_that_is_gone_is_paused_and_replaced() -> None:
    world = World()
    world.change(schedule=GONE, zones_version="1970a")
    paused = with_state(world.job, world.seen(), paused=True).after.scheduling
    assert paused == structs.replace(world.scheduling, paused=True)
    world.now += 2 * HOUR
    resumed = with_state(world.job, world.seen(), paused=False)
    assert (resumed.after.scheduling, resumed.fires) == (world.scheduling, ())
    with pytest.raises(KeyError):
        world.look()
    world.put(Schedule(rate=Rate(1, "day")))
    assert world.scheduling.next_at == world.now + DAY
    started = world.look().started
    assert started is not None
    assert started.instant == START + HOUR


@pytest.mark.parametrize(
    ("change", "reason"), [({"paused": True}, "paused"), ({"overlap": Overlap.SKIP}, "run_live")]
)
def test_a_wait_ends_with_a_pause_and_with_the_wish_to_wait(
    change: dict[str, Any], reason: str
) -> None:
    world = World(overlap=Overlap.WAIT)
    world.after(HOUR, is_live=True)
    world.change(**change)
    assert world.after(MINUTE, is_live=True).run is None
    assert world.record == [("skipped", reason, 1)]
    assert not world.scheduling.waiting


def test_a_wait_that_may_not_start_is_skipped() -> None:
    world = World(overlap=Overlap.WAIT)
    world.after(HOUR, is_live=True)
    world.after(MINUTE, refused=SkipReason.QUOTA_EXCEEDED)
    assert world.record == [("skipped", "quota_exceeded", 1)]
    assert not world.scheduling.waiting


def test_rows_grow_also_after_the_clock_was_set_back() -> None:
    world = World()
    world.after(HOUR)
    world.after(HOUR, refused=SkipReason.QUOTA_EXCEEDED)
    world.clock = FakeClock(start=START - DAY)
    world.after(HOUR)
    assert world.record == [
        ("started", None, 1),
        ("skipped", "quota_exceeded", 1),
        ("started", None, 1),
    ]


def test_a_clock_set_back_fires_nothing_again() -> None:
    world = World(NINE_IN_BERLIN)
    world.after(DAY)
    world.now -= 3 * HOUR
    for _ in range(3 * 60):
        due_at = world.scheduling.due_at
        assert due_at is not None
        assert due_at > world.now
        world.now += MINUTE
    assert world.decided == 1


def test_another_schedule_set_while_the_clock_is_back_does_not_fire_again() -> None:
    world = World(NINE_IN_BERLIN)
    world.after(DAY)
    twice = Schedule(calendar=Calendar((9, 11)), timezone="Europe/Berlin")
    changed = with_schedule(world.scheduling, twice, now=START)
    assert changed.next_nominal == "2026-01-01T11:00:00"


def test_the_same_schedule_changes_no_anchor() -> None:
    world = World()
    world.after(HOUR)
    same = Schedule(rate=Rate(1, "hour"))
    assert with_schedule(world.scheduling, same, now=world.now + 1) is world.scheduling
    other = with_schedule(world.scheduling, Schedule(rate=Rate(2, "hour")), now=world.now + 1)
    assert (other.anchor, other.next_at) == (world.now + 1, world.now + 1 + 2 * HOUR)


@pytest.mark.parametrize("shift", [-HOUR, HOUR])
def test_other_rules_of_zones_move_a_fire_and_make_no_second_one(shift: int) -> None:
    world = World(NINE_IN_BERLIN)
    next_at = world.scheduling.next_at
    assert next_at is not None
    world.change(zones_version="1970a", next_at=next_at + shift)
    assert with_present_zones(world.scheduling).next_at == next_at
    world.now = next_at
    assert world.look().run is not None
    after = world.scheduling.next_at
    assert after == next_at + DAY
    world.change(zones_version="1970a", next_at=after + shift, last_at=next_at + shift)
    assert with_present_zones(world.scheduling).next_nominal == "2026-01-02T09:00:00"
    assert with_present_zones(world.scheduling).next_at == after


def test_a_fire_that_other_rules_have_moved_away_is_not_made_early() -> None:
    world = World(NINE_IN_BERLIN)
    next_at = world.scheduling.next_at
    assert next_at is not None
    world.change(zones_version="1970a", next_at=next_at - HOUR)
    world.now = next_at - HOUR
    assert world.look().run is None
    assert (world.scheduling.next_at, world.scheduling.zones_version) == (next_at, ZONES_VERSION)
    assert world.record == []


def test_a_gap_of_two_hours_turns_two_fires_around_and_both_are_made() -> None:
    """On that day 02:00 is read as 04:00, after 03:00."""
    world = World(Schedule(calendar=Calendar((2, 3)), timezone="Antarctica/Troll"))
    world.now = round(datetime(2026, 3, 29, tzinfo=UTC).timestamp() * 1_000)
    world.look()
    for _ in range(2):
        assert world.scheduling.next_at is not None
        world.now = world.scheduling.next_at
        world.look()
        world.change(zones_version="1970a")
    assert world.started[-2:] == ["2026-03-29T03:00:00", "2026-03-29T02:00:00"]


def test_a_year_of_a_time_inside_the_gap_has_as_many_fires_as_days() -> None:
    world = World(Schedule(calendar=Calendar((2,)), timezone="Europe/Berlin"))
    while (next_at := world.scheduling.next_at or 0) < START + 365 * DAY:
        world.now = next_at
        world.look()
    days = {nominal[:10] for nominal in world.started}
    assert len(world.started) == len(days) == 365
    assert "2026-03-29T02:00:00" in world.started


def _schedules() -> st.SearchStrategy[Schedule]:
    rates = st.builds(Rate, st.integers(1, 40), st.sampled_from(["minute", "hour", "day"]))
    calendars = st.builds(
        Calendar,
        st.sets(st.integers(0, 23), min_size=1, max_size=4).map(lambda found: tuple(sorted(found))),
        st.sets(st.integers(0, 6), max_size=3).map(lambda found: tuple(sorted(found))),
    )
    zones = st.sampled_from(
        ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "UTC"]
    )
    return st.one_of(
        st.builds(Schedule, rate=rates),
        st.builds(Schedule, calendar=calendars, timezone=zones),
    )


_STEPS = st.lists(
    st.tuples(
        st.integers(-3 * HOUR, 40 * DAY),
        st.booleans(),
        st.sampled_from([None, None, SkipReason.QUOTA_EXCEEDED, SkipReason.KEY_UNREADABLE]),
        st.sampled_from(
            [
                {},
                {"paused": True},
                {"paused": False},
                {"overlap": Overlap.WAIT},
                {"overlap": Overlap.SKIP},
                {"zones_version": "1970a"},
            ]
        ),
    ),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.guarantee("G21")
@given(_schedules(), _STEPS)
@settings(max_examples=150, deadline=None)
def test_each_fire_is_decided_once_whatever_happens(
    schedule: Schedule, steps: list[tuple[int, bool, SkipReason | None, dict[str, Any]]]
) -> None:
    """The clock is set back, the schedule is paused, runs are live, or rules change."""
    world = World(schedule)
    for milliseconds, is_live, refused, change in steps:
        world.change(**change)
        before = world.scheduling
        world.after(milliseconds, is_live=is_live, refused=refused)
        next_at = world.scheduling.next_at
        assert next_at is not None
        assert next_at > world.now
        assert before.next_at is None or next_at >= before.next_at
        assert world.scheduling.due_at is not None
        assert world.now < world.scheduling.due_at <= next_at
        passed = _fires_until(schedule, world.scheduling.last_at)
        waiting = 1 if world.scheduling.waiting else 0
        assert world.decided + waiting == len(passed)
        counted = sum(row.count for row in world.rows.values())
        assert counted == world.decided
        rows = sorted(world.rows.values(), key=lambda row: row.fire_id)
        for row, following in zip(rows, rows[1:], strict=False):
            both = {row.status, following.status}
            assert both != {FireStatus.SKIPPED} or row.reason != following.reason


_CHANGES = st.lists(
    st.tuples(
        st.integers(-3 * HOUR, 12 * DAY),
        st.booleans(),
        st.one_of(st.none(), st.tuples(_schedules(), st.sampled_from(list(Overlap)))),
        st.sampled_from([{}, {}, {}, {"paused": True}, {"paused": False}]),
    ),
    max_size=12,
)


@pytest.mark.guarantee("G21")
@given(_schedules(), _CHANGES)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_each_fire_is_decided_once_however_often_the_schedule_changes(
    schedule: Schedule,
    steps: list[tuple[int, bool, tuple[Schedule, Overlap] | None, dict[str, Any]]],
) -> None:
    """Of those that are due without a run the newest one runs, unless it is too late."""
    world, passed = World(schedule), 0
    for milliseconds, is_live, change, state in steps:
        world.change(**state)
        world.now += milliseconds
        before, rows = world.scheduling, set(world.rows)
        due = due_fires(before, now=world.now)
        if change is None:
            decision = world.look(is_live=is_live)
        else:
            decision = world.put(change[0], overlap=change[1], is_live=is_live)
            if world.scheduling.last_at == before.last_at:
                due = None  # the same schedule: its fires are due as before
        passed += 0 if due is None else due.all.count
        waiting = 1 if world.scheduling.waiting else 0
        assert (
            world.decided + waiting
            == passed
            == waiting + sum(row.count for row in world.rows.values())
        )
        if not is_live:
            assert SkipReason.RUN_LIVE not in decision.outcomes
        newest = due.newest.instant if due is not None else before.waiting_at
        if decision.started is not None:
            assert decision.started.instant == newest
            look_due = newest if due is not None else before.due_at
            assert look_due is not None
            assert world.now - look_due <= CATCH_UP
        elif change is None and newest and not is_live and not before.paused:
            fresh = [row for fire_id, row in world.rows.items() if fire_id not in rows]
            assert fresh[-1].reason is SkipReason.TOO_LATE
            assert world.now - newest > CATCH_UP


def _fires_until(schedule: Schedule, instant: int) -> list[str]:
    """The nominal times of the fires up to an instant."""
    found = []
    for fire in next_fires(schedule, after=START, anchor=START):
        if fire.instant > instant:
            break
        found.append(fire.nominal)
    return found


def test_the_fires_that_are_due_are_those_of_the_schedule() -> None:
    for schedule in (HOURLY, NINE_IN_BERLIN, GAP_IN_BERLIN):
        fires = upcoming(schedule, after=START, anchor=START, count=200)
        for count in (1, 2, 3, 88, 200):
            world = World(schedule)
            due = due_fires(world.scheduling, now=fires[count - 1].instant)
            assert due is not None
            assert due.newest.nominal == fires[count - 1].nominal
            assert due.all.count == count
            assert due.all.first.nominal == fires[0].nominal
            if due.earlier is not None:
                assert due.earlier.last.nominal == fires[count - 2].nominal
