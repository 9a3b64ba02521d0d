"""The lane that a free slot goes to."""

from __future__ import annotations

import pytest

from conveyor.engine.lanes import Lane, Owner
from conveyor.engine.planner import Eligible, LeastInFlight


def lane(name: str, *, busy: int = 0, priority: int = 5, owner: Owner | None = None) -> Lane:
    made = Lane(queue=name, run_id=name, job_id=name, limit=100, priority=priority, owner=owner)
    made.busy = busy
    return made


def picks(rule: LeastInFlight, lanes: list[Lane], count: int) -> list[str]:
    """The queues of lanes picked one after the other, none of which gets a message."""
    found = [rule.pick(lanes, lambda _lane: True) for _ in range(count)]
    return [one.queue for one in found if one is not None]


def test_equals_take_turns_in_the_order_in_which_they_were_picked() -> None:
    rule = LeastInFlight()
    lanes = [lane("a"), lane("b"), lane("c")]

    assert picks(rule, lanes, 7) == ["c", "b", "a", "c", "b", "a", "c"]
    lanes.append(lane("new"))
    assert picks(rule, lanes, 4) == ["new", "b", "a", "c"]


def test_the_fewest_in_hand_for_the_weight_come_first() -> None:
    rule = LeastInFlight()
    busier, urgent = lane("busier", busy=3), lane("urgent", busy=5, priority=7)

    assert picks(rule, [busier, urgent], 3) == ["urgent"] * 3
    urgent.busy = 7
    assert picks(rule, [busier, urgent], 3) == ["busier"] * 3
    urgent.busy = 6  # twice as many for twice the weight: equals
    assert sorted(picks(rule, [busier, urgent], 2)) == ["busier", "urgent"]


def test_a_lane_that_may_not_be_asked_is_passed_over() -> None:
    rule = LeastInFlight()
    idle, busy = lane("idle"), lane("busy", busy=9)

    assert rule.pick([idle, busy], lambda one: one is busy) is busy
    assert rule.pick([idle, busy], lambda _lane: False) is None
    assert rule.pick([], lambda _lane: True) is None


def shares(
    rule: LeastInFlight,
    lanes: list[Lane],
    slots: int,
    eligible: Eligible = lambda _lane: True,
) -> dict[str, int]:
    """Fill the slots, one pick a message, and count what each lane has then."""
    for _ in range(slots):
        found = rule.pick(lanes, eligible)
        assert found is not None
        found.busy += 1
    return {one.queue: one.busy for one in lanes}


def test_a_caller_with_many_runs_has_one_share_which_they_divide() -> None:
    many, one = Owner("many"), Owner("one")
    lanes = [lane(f"m{number}", owner=many) for number in range(5)] + [lane("single", owner=one)]

    assert shares(LeastInFlight(), lanes, 40) == {
        **{f"m{number}": 4 for number in range(5)},
        "single": 20,
    }
    assert (many.busy, one.busy) == (20, 20)


def test_a_caller_has_the_share_of_its_highest_priority_and_its_runs_weigh_within() -> None:
    urgent, plain = Owner("urgent"), Owner("plain")
    lanes = [
        lane("first", priority=7, owner=urgent),
        lane("second", priority=5, owner=urgent),
        lane("other", owner=plain),
    ]

    assert shares(LeastInFlight(), lanes, 90) == {"first": 40, "second": 20, "other": 30}


@pytest.mark.parametrize("is_empty", [True, False], ids=["an empty queue", "nothing to ask for"])
def test_a_run_that_has_nothing_to_do_lends_its_caller_no_weight(is_empty: bool) -> None:
    mixed, plain = Owner("mixed"), Owner("plain")
    idle = lane("idle", priority=9, owner=mixed)
    lanes = [lane("bulk", owner=mixed), lane("other", owner=plain)]
    if is_empty:
        idle.found_nothing(0.0, empties_before=0)

    def eligible(one: Lane) -> bool:
        return is_empty or one is not idle

    assert shares(LeastInFlight(), lanes, 40, eligible) == {"bulk": 20, "other": 20}
    idle.busy = 4  # work again, and with it the weight: for a while all goes to its caller
    assert shares(LeastInFlight(), lanes, 44, eligible) == {"bulk": 64, "other": 20}


def test_more_callers_than_slots_take_turns() -> None:
    rule = LeastInFlight()
    lanes = [
        lane(f"{caller}{run}", owner=owner)
        for caller in "abc"
        for owner in [Owner(caller)]
        for run in (1, 2)
    ]

    found = picks(rule, lanes, 6)
    assert [{name[0] for name in found[place : place + 3]} for place in (0, 3)] == [set("abc")] * 2
    assert len(set(found)) == 6


def test_a_share_that_its_caller_cannot_use_goes_to_others() -> None:
    one, other = Owner("one"), Owner("other")
    empty, full = lane("empty", owner=one), lane("full", busy=30, owner=other)

    assert LeastInFlight().pick([empty, full], lambda lane: lane is full) is full
