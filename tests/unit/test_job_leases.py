"""A worker's lease on permits of one job, and its conclusions from the ledger's answers.

Every mistake that a docstring names makes its test fail when it is put back.
"""

from __future__ import annotations

from conveyor.engine.lanes import Lane
from conveyor.engine.reserve import IDLE_AFTER, JobLease
from conveyor.ports.permits import LedgerState
from conveyor.ports.queues import Delivery, TaskMessage


def lease_with_a_lane(*, permits: int) -> tuple[JobLease, Lane]:
    lane = Lane(queue="run-a", run_id="a", job_id="job", limit=100, priority=5)
    lease = JobLease("job", 100)
    lease.lanes.append(lane)
    lease.permits = permits
    return lease, lane


def ledger_state(*, holders: int, wanting: int) -> LedgerState:
    return LedgerState(granted=True, free=0, holders=holders, wanting=wanting)


def test_permits_that_messages_at_hand_will_use_are_kept() -> None:
    """For the mistake of counting as idle what waits for a slot alone, or for a receive."""
    lease, lane = lease_with_a_lane(permits=5)
    delivery = Delivery(
        queue="run-a", receipt="r", receive_count=1, message=TaskMessage("job", "a", "t")
    )
    lane.buffer.append((delivery, 0.0))
    for now in (0.0, IDLE_AFTER, 2 * IDLE_AFTER):
        lease.shed_idle(now, keep=0, after=IDLE_AFTER)
    lane.buffer.clear()
    lane.refilling = 10
    for now in (3 * IDLE_AFTER, 4 * IDLE_AFTER):
        lease.shed_idle(now, keep=0, after=IDLE_AFTER)
    assert lease.permits == 5
    lane.refilling = 0
    for now in (5 * IDLE_AFTER, 6 * IDLE_AFTER):
        lease.shed_idle(now, keep=0, after=IDLE_AFTER)
    assert lease.permits == 0


def test_a_worker_that_wants_more_is_not_one_of_the_others() -> None:
    """For the mistake of counting its own want among those of the others."""
    lease, _lane = lease_with_a_lane(permits=0)
    lease.wants = True
    lease.observe(ledger_state(holders=1, wanting=1), 0.0)
    assert lease.others_want == 0
    assert lease.fair == 50
    lease.observe(ledger_state(holders=1, wanting=2), 0.0)
    assert lease.others_want == 1
    lease.wants = False
    lease.observe(ledger_state(holders=1, wanting=2), 0.0)
    assert lease.others_want == 2


def test_half_of_the_excess_is_handed_over_while_others_want_some() -> None:
    """For the mistake of going on when nobody wants any more (`surplus` that is never cleared)."""
    lease, _lane = lease_with_a_lane(permits=90)
    lease.observe(ledger_state(holders=1, wanting=1), 0.0)
    for _ in range(5):
        lease.hand_over()
    assert lease.permits == 85
    lease.observe(ledger_state(holders=2, wanting=0), 1.0)
    for _ in range(50):
        lease.hand_over()
    assert lease.permits == 85
