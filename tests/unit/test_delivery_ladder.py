"""The ladder of a delivery: when the next attempt is due, when there is none, and what a replay
changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from conveyor.domain.deliveries import (
    DELIVERED,
    GONE_PAUSE,
    LADDER,
    LONGEST,
    MOST_ATTEMPTS_KEPT,
    SHORTENED,
    AttemptResult,
    DeliveryStatus,
    EventDelivery,
    begin_attempt,
    dropped,
    end_attempt,
    event_id,
    interrupted,
    put_off,
    receiver_health,
    replayed,
)
from conveyor.domain.ids import is_ulid

NOW = 1_767_225_600_000
BAD = AttemptResult(error="http_5xx:500", status=500)
GOOD = AttemptResult(status=200)
WEEK = 7 * 86_400
PENDING, FAILED = DeliveryStatus.PENDING, DeliveryStatus.FAILED

fractions = st.floats(0, 1, exclude_max=True)
answers = st.builds(
    lambda status, after: AttemptResult(error="no", status=status, retry_after=after),
    st.sampled_from([None, 302, 404, 410, 429, 500, 503]),
    st.none() | st.floats(0, 1e9),
)


def owed(**fields: object) -> EventDelivery:
    delivery = EventDelivery(
        delivery_id=event_id("01", "run.completed", ended_at=NOW),
        caller="caller",
        job_id="job",
        run_id="run",
        event_type="run.completed",
        body=b"{}",
        created_at=NOW,
        due_at=NOW,
        updated_at=NOW,
    )
    return structs.replace(delivery, **fields)


def attempt(
    delivery: EventDelivery,
    result: AttemptResult,
    *,
    late: int = 0,
    lasts: int = 0,
    random: float = 0.0,
) -> EventDelivery:
    """Make the attempt that is due, `late` milliseconds after it was, for `lasts` milliseconds."""
    start = delivery.due_at + late
    begun = begin_attempt(delivery, now=start, lapses_at=start + 60_000)
    number, ladder = begun.attempt_count, begun.ladder
    return end_attempt(begun, number, ladder, result, now=start + lasts, random=random)


def wait_after(result: AttemptResult, *, failures: int = 0, random: float = 0.0) -> float:
    """Return the seconds from the end of an attempt to the next one."""
    after = attempt(owed(failures=failures), result, random=random)
    return (after.due_at - NOW) / 1_000


@given(st.lists(st.tuples(fractions, st.integers(0, 15_000)), min_size=10, max_size=10))
def test_ten_attempts_climb_the_ladder_inside_its_bounds(steps: list[tuple[float, int]]) -> None:
    delivery = owed()
    for rung, (random, lasts) in zip(LADDER, steps, strict=False):
        start = delivery.due_at
        delivery = attempt(delivery, BAD, lasts=lasts, random=random)
        wait = (delivery.due_at - start - lasts) / 1_000
        assert delivery.status is PENDING
        # A millisecond is a wait's last digit.
        assert rung * (1 - SHORTENED) - 0.001 <= wait <= rung
    delivery = attempt(delivery, BAD)

    starts = [one.started_at for one in delivery.attempts]
    assert (delivery.status, delivery.due_at) == (FAILED, 0)
    assert [one.number for one in delivery.attempts] == list(range(1, 11))
    assert starts[-1] - starts[0] <= LONGEST * 1_000


@given(
    st.lists(
        st.tuples(answers, fractions, st.integers(0, 15_000), st.integers(0, 10**9)), min_size=12
    )
)
@pytest.mark.slow
def test_every_ladder_ends_and_its_last_attempt_is_due_inside_72_hours(
    steps: list[tuple[AttemptResult, float, int, int]],
) -> None:
    """Whatever receivers answer, and however late workers look."""
    delivery, due, made = owed(), [NOW], 0
    for result, random, lasts, late in steps * 3:
        if delivery.status is not PENDING:
            break
        made += 1
        end = delivery.due_at + late + lasts
        delivery = attempt(delivery, result, late=late, lasts=lasts, random=random)
        if delivery.status is PENDING:
            due.append(delivery.due_at)
            assert delivery.due_at >= min(end, delivery.first_at + LONGEST * 1_000)

    assert delivery.status is FAILED
    assert made == len(due) <= len(LADDER) + 1
    assert due == sorted(due)
    assert due[-1] - delivery.first_at <= LONGEST * 1_000


RETRY_AFTER = [
    # status, failures before, seconds asked for, seconds waited at most
    (503, 0, 120, 120),
    (429, 0, 120, 120),
    (429, 0, 5, 5),
    (503, 0, 1, 5),  # no sooner than without one
    (503, 0, 0, 5),
    (503, 0, -100, 5),
    (503, 0, None, 5),
    (503, 0, 301, 300),  # no longer than the next rung
    (503, 0, 1e9, 300),
    (503, 1, 1_000, 1_000),
    (503, 1, 1_801, 1_800),
    (503, 4, 36_001, 36_000),
    (503, 7, 1e9, 72_000),
    (503, 8, 1e9, 72_000),  # there is no rung after the last one
    (500, 0, 120, 5),  # of other answers it does not count
    (404, 0, 120, 5),
    (302, 0, 120, 5),
    (None, 0, 120, 5),
]


@pytest.mark.parametrize(("status", "failures", "asked", "waited"), RETRY_AFTER)
def test_retry_after_moves_the_next_attempt(
    status: int | None, failures: int, asked: float | None, waited: float
) -> None:
    result = AttemptResult(error="no", status=status, retry_after=asked)

    assert wait_after(result, failures=failures) == waited


@given(st.sampled_from([429, 503]), st.integers(0, 8), st.floats(-1e9, 1e9), fractions)
def test_no_retry_after_makes_an_attempt_earlier(
    status: int, failures: int, asked: float, random: float
) -> None:
    told = AttemptResult(error="no", status=status, retry_after=asked)
    untold = AttemptResult(error="no", status=status)
    least = wait_after(untold, failures=failures, random=random)

    assert least <= wait_after(told, failures=failures, random=random)


def test_what_would_fall_later_than_72_hours_is_made_then_and_is_the_last() -> None:
    first = NOW - 60 * 3_600_000
    result = AttemptResult(error="no", status=503, retry_after=1e9)
    waiting = attempt(owed(first_at=first, failures=7), result)
    assert (waiting.due_at, waiting.is_last) == (first + LONGEST * 1_000, True)

    assert attempt(waiting, BAD).status is FAILED
    assert attempt(waiting, GOOD).status is DeliveryStatus.DELIVERED
    assert attempt(waiting, result, late=WEEK * 1_000).status is FAILED


def test_410_gets_one_more_attempt_an_hour_later() -> None:
    gone = AttemptResult(error="http_4xx:410", status=410)
    waiting = attempt(attempt(owed(), BAD), gone, random=0.9)
    assert waiting.due_at - waiting.attempts[-1].started_at == GONE_PAUSE * 1_000

    assert attempt(waiting, gone).status is FAILED
    assert attempt(waiting, BAD).status is FAILED
    assert attempt(waiting, GOOD).status is DeliveryStatus.DELIVERED


def test_404_climbs_the_ladder_like_any_other_failure() -> None:
    assert wait_after(AttemptResult(error="http_4xx:404", status=404)) == LADDER[0]


@pytest.mark.parametrize("late", [0, LONGEST + 1, WEEK, 365 * 86_400])
def test_a_first_attempt_is_made_however_late_and_has_a_whole_ladder(late: int) -> None:
    after = attempt(owed(), BAD, late=late * 1_000)

    assert after.status is PENDING
    assert after.first_at == NOW + late * 1_000
    assert after.due_at == after.first_at + LADDER[0] * 1_000


def test_an_attempt_after_a_long_stop_is_made_and_then_is_the_last() -> None:
    waiting = attempt(owed(), BAD)

    assert attempt(waiting, BAD, late=WEEK * 1_000).status is FAILED
    assert attempt(waiting, GOOD, late=WEEK * 1_000).status is DeliveryStatus.DELIVERED


def test_a_replay_begins_anew_whatever_became_of_the_delivery() -> None:
    failed = owed()
    while failed.status is PENDING:
        failed = attempt(failed, BAD)
    for before in (failed, attempt(owed(), GOOD), dropped(owed(), now=NOW), attempt(owed(), BAD)):
        again = replayed(before, now=NOW + 1)
        assert (again.status, again.due_at, again.ladder) == (PENDING, NOW + 1, before.ladder + 1)
        assert (again.body, again.delivery_id) == (before.body, before.delivery_id)
        count = 0
        while again.status is PENDING:
            again, count = attempt(again, BAD), count + 1
        assert count == len(LADDER) + 1
        assert again.attempt_count == before.attempt_count + count
        assert [one.is_replay for one in again.attempts[-count:]] == [True] * count


def test_an_attempt_of_an_earlier_ladder_ends_as_itself() -> None:
    begun = begin_attempt(owed(), now=NOW, lapses_at=NOW + 60_000)
    again = replayed(begun, now=NOW + 5)
    for result in (BAD, GOOD):
        ended = end_attempt(again, 1, 1, result, now=NOW + 9, random=0.5)
        assert ended.attempts[0].outcome == (result.error or DELIVERED)
        assert (ended.status, ended.due_at, ended.leased_until) == (PENDING, NOW + 5, 0)
        assert ended.failures == 0


def test_a_delivery_that_has_ended_meanwhile_stays_as_it_is() -> None:
    begun = begin_attempt(owed(), now=NOW, lapses_at=NOW + 60_000)
    gone = dropped(begun, now=NOW + 1)
    for result in (BAD, GOOD):
        ended = end_attempt(gone, 1, 1, result, now=NOW + 9, random=0.5)
        assert (ended.status, ended.due_at) == (DeliveryStatus.DROPPED, 0)
        assert ended.attempts[0].outcome == (result.error or DELIVERED)


def test_an_attempt_that_was_overtaken_keeps_off_the_lease_of_the_later_one() -> None:
    first = begin_attempt(owed(), now=NOW, lapses_at=NOW + 60_000)
    second = begin_attempt(first, now=NOW + 60_000, lapses_at=NOW + 120_000)
    failed = end_attempt(second, 1, 1, BAD, now=NOW + 61_000, random=0.5)
    assert (failed.leased_until, failed.failures, failed.due_at) == (NOW + 120_000, 0, NOW)
    arrived = end_attempt(second, 1, 1, GOOD, now=NOW + 61_000, random=0.5)
    assert (arrived.status, arrived.leased_until) == (DeliveryStatus.DELIVERED, NOW + 120_000)
    both = end_attempt(arrived, 2, 1, BAD, now=NOW + 62_000, random=0.5)
    assert (both.status, both.leased_until) == (DeliveryStatus.DELIVERED, 0)


def test_an_interrupted_attempt_climbs_no_rung() -> None:
    begun = begin_attempt(owed(), now=NOW, lapses_at=NOW + 60_000)
    after = interrupted(begun, now=NOW + 3)

    assert (after.due_at, after.leased_until, after.failures) == (NOW, 0, 0)
    assert [one.outcome for one in after.attempts] == [""]
    assert attempt(after, GOOD).attempts[-1].number == 2


def test_the_newest_attempts_are_kept_and_all_are_counted() -> None:
    delivery = owed()
    for _ in range(MOST_ATTEMPTS_KEPT + 7):
        delivery = interrupted(begin_attempt(delivery, now=NOW, lapses_at=NOW + 60_000), now=NOW)

    numbers = [one.number for one in delivery.attempts]
    assert numbers == list(range(8, MOST_ATTEMPTS_KEPT + 8))
    assert delivery.attempt_count == MOST_ATTEMPTS_KEPT + 7


def test_every_change_has_a_version_of_its_own_and_never_turns_time_back() -> None:
    delivery = owed()
    changes = [
        begin_attempt(delivery, now=NOW - 5, lapses_at=NOW + 1),
        interrupted(delivery, now=NOW - 5),
        put_off(delivery, due_at=NOW + 5, now=NOW - 5),
        dropped(delivery, now=NOW - 5),
        replayed(delivery, now=NOW - 5),
        end_attempt(delivery, 0, 1, BAD, now=NOW - 5, random=0.0),
    ]

    assert {one.version for one in changes} == {2}
    assert {one.updated_at for one in changes} == {NOW}


@given(st.text(), st.sampled_from(["run.completed", "run.failed"]), st.integers(0, 2**48 - 1))
def test_the_id_of_an_event_follows_from_run_type_and_end(
    run_id: str, kind: str, ended_at: int
) -> None:
    made = event_id(run_id, kind, ended_at=ended_at)

    assert is_ulid(made)
    assert made == event_id(run_id, kind, ended_at=ended_at)
    assert made != event_id(run_id + "x", kind, ended_at=ended_at)
    assert made != event_id(run_id, "run.stopped", ended_at=ended_at)


def test_the_next_attempt_at_a_receiver_is_that_of_the_delivery_due_first() -> None:
    waiting = [owed(due_at=NOW + 9), owed(due_at=NOW + 5), owed(due_at=NOW + 7)]

    assert receiver_health(waiting).next_at == NOW + 5
    assert receiver_health([dropped(one, now=NOW) for one in waiting]).next_at == 0
