"""A worker's lease on permits of one job, and its conclusions from the ledger's answers.

Every mistake that a docstring names makes its test fail when it is put back.
"""

from __future__ import annotations

import pytest

from conveyor.engine.lanes import Lane
from conveyor.engine.leases import (
    IDLE_AFTER,
    REFUSAL_CAP,
    REFUSAL_CAP_PER_WORKER,
    SMALL_LIMIT_PATIENCE,
    JobLease,
)
from conveyor.ports.permits import LedgerState
from conveyor.ports.queues import Delivery, TaskMessage


def lease_with_a_lane(*, permits: int) -> tuple[JobLease, Lane]:
    lane = Lane(queue="run-a", run_id="a", job_id="job", limit=100, priority=5)
    lease = JobLease("job", 100)
    lease.add(lane)
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
        lease.hand_over(0.0)
    assert lease.permits == 85
    lease.observe(ledger_state(holders=2, wanting=0), 1.0)
    for _ in range(50):
        lease.hand_over(0.0)
    assert lease.permits == 85


def test_a_block_that_was_granted_whole_doubles_the_next_one_up_to_the_slots() -> None:
    """For the mistake of growing by another factor, or past what the slots could use."""
    lease, _lane = lease_with_a_lane(permits=0)
    asked = []
    for _ in range(5):
        asked.append(lease.growth(0.0))
        lease.served(50)
    assert asked == [10, 20, 40, 50, 50]


def test_a_fair_share_is_kept_and_what_is_handed_over_is_told() -> None:
    """For the mistake of handing over where there is no excess, or without telling the ledger."""
    lease, _lane = lease_with_a_lane(permits=50)
    lease.observe(ledger_state(holders=1, wanting=1), 0.0)
    lease.hand_over(0.0)
    assert (lease.permits, lease.dirty) == (50, False)
    lease.permits = 52
    lease.observe(ledger_state(holders=1, wanting=1), 0.0)
    for _ in range(3):
        lease.hand_over(0.0)
    assert (lease.permits, lease.dirty) == (51, True)


def test_idle_permits_that_are_dropped_are_told() -> None:
    """For the mistake of keeping the ledger's count of them until the lease lapses."""
    lease, _lane = lease_with_a_lane(permits=3)
    for now in (0.0, IDLE_AFTER):
        lease.shed_idle(now, keep=1, after=IDLE_AFTER)
    assert (lease.permits, lease.dirty) == (1, True)


def test_of_permits_that_were_lost_the_ledger_is_told_nothing() -> None:
    """For the mistake of a call for each lease once a ledger that was away is back: it has taken
    the permits back by itself."""
    lease, _lane = lease_with_a_lane(permits=5)
    lease.shed_idle(0.0, keep=1, after=0.0)
    assert (lease.permits, lease.dirty) == (1, True)
    for _ in range(2):
        lease.forfeit()
        assert (lease.permits, lease.dirty) == (0, False)


def test_a_full_ledger_is_asked_more_rarely_the_more_workers_ask_it() -> None:
    """For the mistake of counting a worker without permits as nobody, or one with some twice."""
    pauses = {}
    for permits, wanting in ((0, 0), (0, 20), (5, 20)):
        lease, _lane = lease_with_a_lane(permits=permits)
        lease.observe(ledger_state(holders=1, wanting=wanting), 0.0)
        for _ in range(30):
            lease.refused(0.0, jitter=0.5)
        pauses[permits, wanting] = lease.cool_until
    assert pauses[0, 0] == REFUSAL_CAP
    assert pauses[0, 20] == pytest.approx(REFUSAL_CAP_PER_WORKER * 22)
    assert pauses[5, 20] == pytest.approx(REFUSAL_CAP_PER_WORKER * 21)


def test_a_limit_of_two_batches_is_the_least_that_is_asked_for_often() -> None:
    """For the mistake of another limit: below it nearly every call would be refused."""
    longest = {}
    for limit in (19, 20):
        lease = JobLease("job", limit)
        for _ in range(30):
            lease.refused(0.0, jitter=0.5)
        longest[limit] = lease.cool_until
    assert longest == {19: SMALL_LIMIT_PATIENCE * REFUSAL_CAP, 20: REFUSAL_CAP}
