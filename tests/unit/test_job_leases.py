"""A share: its permits, and its conclusions from the ledger's answers.

Every mistake that a docstring names makes its test fail when it is put back.
"""

from __future__ import annotations

from conveyor.engine.lanes import Lane
from conveyor.engine.reserve import IDLE_AFTER, JobLease
from conveyor.ports.permits import LedgerState
from conveyor.ports.queues import Delivery, TaskMessage


def share_with_a_lane(*, permits: int) -> tuple[JobLease, Lane]:
    lane = Lane(queue="run-a", run_id="a", job_id="job", limit=100, priority=5)
    share = JobLease("job", 100)
    share.lanes.append(lane)
    share.permits = permits
    return share, lane


def standing(*, holders: int, wanting: int) -> LedgerState:
    return LedgerState(granted=True, free=0, holders=holders, wanting=wanting)


def test_permits_that_messages_at_hand_will_use_are_kept() -> None:
    """For the mistake of counting as idle what waits for a slot alone, or for a receive."""
    share, lane = share_with_a_lane(permits=5)
    delivery = Delivery(
        queue="run-a", receipt="r", receive_count=1, message=TaskMessage("job", "a", "t")
    )
    lane.buffer.append((delivery, 0.0))
    for now in (0.0, IDLE_AFTER, 2 * IDLE_AFTER):
        share.shed_idle(now, keep=0, after=IDLE_AFTER)
    lane.buffer.clear()
    lane.refilling = 10
    for now in (3 * IDLE_AFTER, 4 * IDLE_AFTER):
        share.shed_idle(now, keep=0, after=IDLE_AFTER)
    assert share.permits == 5
    lane.refilling = 0
    for now in (5 * IDLE_AFTER, 6 * IDLE_AFTER):
        share.shed_idle(now, keep=0, after=IDLE_AFTER)
    assert share.permits == 0


def test_a_worker_that_wants_more_is_not_one_of_the_others() -> None:
    """For the mistake of counting its own want among those of the others."""
    share, _lane = share_with_a_lane(permits=0)
    share.wants = True
    share.observe(standing(holders=1, wanting=1), 0.0)
    assert share.others_want == 0
    assert share.fair == 50
    share.observe(standing(holders=1, wanting=2), 0.0)
    assert share.others_want == 1
    share.wants = False
    share.observe(standing(holders=1, wanting=2), 0.0)
    assert share.others_want == 2


def test_half_of_the_excess_is_handed_over_while_others_want_some() -> None:
    """For the mistake of going on when nobody wants any more (`surplus` that is never cleared)."""
    share, _lane = share_with_a_lane(permits=90)
    share.observe(standing(holders=1, wanting=1), 0.0)
    for _ in range(5):
        share.hand_over()
    assert share.permits == 85
    share.observe(standing(holders=2, wanting=0), 1.0)
    for _ in range(50):
        share.hand_over()
    assert share.permits == 85
