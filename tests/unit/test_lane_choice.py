"""The lane that a free slot goes to."""

from __future__ import annotations

from conveyor.engine.lanes import Lane
from conveyor.engine.planner import LeastInFlight


def lane(name: str, *, busy: int = 0, priority: int = 5) -> Lane:
    made = Lane(queue=name, run_id=name, job_id=name, limit=100, priority=priority)
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
