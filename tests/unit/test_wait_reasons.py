"""The choice among the reasons for which a run waits, from the run and its workers' words."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.model import Ingest, IngestStatus, Run, RunStats, RunStatus
from conveyor.domain.run_waits import Crew, LaneReport, RunWaitReason, WorkerReport, run_wait
from tests.unit.spec_document import table

NOW = 1_767_225_600_000
HEARTBEAT = 10.0
BEAT = 10_000
R = RunWaitReason


def run(*, done: int = 10, total: int = 100, **fields: Any) -> Run:
    stats = RunStats(total=total, successful=done)
    values = {"status": RunStatus.RUNNING, "created_at": NOW - 500, "updated_at": NOW, **fields}
    return Run(run_id="R", job_id="J", run_sequence=1, stats=stats, **values)


def lane(reason: RunWaitReason | None = None, run_id: str = "R", **fields: Any) -> LaneReport:
    values = {"limit": 20, "ceiling": 20, "since": NOW - 3_000, **fields}
    return LaneReport(run_id=run_id, reason=reason, **values)


def worker(*lanes: LaneReport, name: str = "W", age: int = 0, **fields: Any) -> WorkerReport:
    values = {"slots": 4, "in_use": 0, "claim_seconds": 60.0, **fields}
    return WorkerReport(
        worker_id=name,
        version="1",
        started_at=NOW - 90_000,
        said_at=NOW - age,
        heartbeat=HEARTBEAT,
        lanes=lanes,
        **values,
    )


def crew(*workers: WorkerReport, heard_at: int = NOW) -> Crew:
    return Crew(workers, heard_at=heard_at, heartbeat=HEARTBEAT)


def ingesting(*, written: int = 0, done: int = 0, **fields: Any) -> Run:
    ingest = Ingest(status=IngestStatus.PENDING, end=100, next_index=written)
    return run(done=done, ingest=ingest, **fields)


LATER = NOW + 5_000
CASES: dict[RunWaitReason, tuple[Run, Crew, str]] = {
    R.PAUSED: (run(paused=True), crew(worker()), "the run is paused"),
    R.INGESTING: (
        ingesting(),
        crew(worker()),
        "no task is written yet that could be worked: 0 of 100",
    ),
    R.NO_WORKER: (
        run(),
        crew(heard_at=NOW - 3 * BEAT - 1),
        "no worker has said a word for 3 heartbeats of 10 s",
    ),
    R.QUEUE_LOST: (
        run(),
        crew(worker(lane(R.QUEUE_LOST))),
        "the queue of the run is missing, and is being made again",
    ),
    R.PERMITS_CLOSED: (
        run(),
        crew(worker(lane(R.PERMITS_CLOSED, until=LATER))),
        "the ledger of permits was begun anew, and grants nothing yet",
    ),
    R.BODIES_NOT_KEPT: (
        run(),
        crew(worker(lane(R.BODIES_NOT_KEPT), away=("result store",)), worker(name="V")),
        "bodies cannot be stored, so work is held back: 1 of 2 workers",
    ),
    R.GATEWAY_THROTTLED: (
        run(),
        crew(worker(lane(R.GATEWAY_THROTTLED, in_flight=3, ceiling=3, limit=100))),
        "the gateway refuses for load: 3 calls at a time of 100",
    ),
    R.HOST_CLOSED: (
        run(),
        crew(worker(lane(R.HOST_CLOSED, put_off=90, until=LATER))),
        "every task left waits for its host, which asked for a pause or is at a limit: 90 tasks",
    ),
    R.RETRY_BACKOFF: (
        run(done=99),
        crew(worker(lane(R.RETRY_BACKOFF, put_off=1, until=LATER))),
        "every task left waits for its next attempt: 1 task",
    ),
    R.CLAIMS_HELD: (
        run(),
        crew(worker(lane(in_flight=7), age=4 * BEAT), worker(name="V")),
        "7 tasks are under claims of a worker that is silent",
    ),
    R.MAX_INFLIGHT: (
        run(),
        crew(worker(lane(R.MAX_INFLIGHT, in_flight=20))),
        "the cap is in use: 20 of 20",
    ),
    R.SLOTS: (
        run(),
        crew(worker(lane(R.SLOTS, in_flight=9, calling=1), in_use=4), worker(name="V", in_use=4)),
        "every slot is taken: 8 slots of 2 workers, 1 of them by this run",
    ),
}


@pytest.mark.parametrize("reason", RunWaitReason)
def test_each_reason_is_told_with_its_numbers(reason: RunWaitReason) -> None:
    shown, workers, detail = CASES[reason]
    wait = run_wait(shown, workers, NOW)
    assert wait is not None
    assert (wait.reason, wait.detail, wait.others) == (reason, detail, ())
    assert wait.since <= NOW
    ends = {R.PERMITS_CLOSED, R.HOST_CLOSED, R.RETRY_BACKOFF}
    assert (wait.until == LATER) is (reason in ends)


@pytest.mark.parametrize(
    ("shown", "workers"),
    [
        (run(status=RunStatus.COMPLETED, paused=True), crew(heard_at=0)),
        (run(status=RunStatus.PENDING), crew(heard_at=0)),
        (run(), None),
        (run(), crew(heard_at=NOW - 3 * BEAT)),
        (run(), crew(worker(), worker(name="V", age=9 * BEAT))),
        (run(), crew(worker(lane(R.MAX_INFLIGHT, "another")))),
        (run(done=80), crew(worker(lane(R.MAX_INFLIGHT, in_flight=20)))),
        (run(done=100), crew(worker(lane(R.QUEUE_LOST)))),
        (run(), crew(worker(lane(R.RETRY_BACKOFF, put_off=89), lane(in_flight=0)), worker(
            lane(in_flight=1), name="V"))),
        (run(), crew(worker(lane(R.PERMITS_CLOSED, until=NOW)))),
        (run(), crew(worker(lane(R.RETRY_BACKOFF, put_off=90, until=NOW), age=BEAT + 1))),
        (run(done=95), crew(
            worker(lane(R.RETRY_BACKOFF, put_off=3, until=NOW), age=BEAT + 1),
            worker(lane(R.RETRY_BACKOFF, put_off=2, until=LATER), name="V"))),
        (run(done=95), crew(worker(lane(R.HOST_CLOSED, put_off=4, until=LATER)))),
        (run(done=95), crew(worker(lane(R.CLAIMS_HELD, put_off=4, until=LATER)))),
        (run(), crew(worker(lane(R.SLOTS), in_use=4), worker(lane(), name="V", in_use=4))),
        (run(), crew(worker(lane(R.SLOTS), in_use=4), worker(name="V", in_use=3))),
        (run(), crew(worker(lane(in_flight=7), age=6 * BEAT + 1), worker(name="V"))),
        (ingesting(written=20, done=10), crew(worker())),
        (ingesting(written=1, done=50, rerun_of="S"), crew(worker())),
    ],
    ids=[
        "ended", "idle", "nothing known", "heard of late", "one of two silent", "another run",
        "all in hand", "all done", "one at work", "open by now", "due by now",
        "some due by now", "some of other hosts", "some under no claim", "a lane with room",
        "a worker with a free slot", "claims lapsed", "rows written", "rows copied",
    ],
)  # fmt: skip
def test_nothing_is_told_where_nothing_holds(shown: Run, workers: Crew | None) -> None:
    assert run_wait(shown, workers, NOW) is None


def test_the_first_of_the_list_is_told_and_the_others_named() -> None:
    closed = worker(lane(R.PERMITS_CLOSED, until=LATER))
    lost = worker(lane(R.QUEUE_LOST), name="V")
    silent = worker(lane(in_flight=2), name="S", age=4 * BEAT)
    wait = run_wait(run(), crew(closed, lost, silent), NOW)
    assert wait is not None
    assert (wait.reason, wait.others) == (R.QUEUE_LOST, (R.PERMITS_CLOSED, R.CLAIMS_HELD))
    nobody = run_wait(ingesting(paused=True), crew(heard_at=0), NOW)
    assert nobody is not None
    assert (nobody.reason, nobody.others) == (R.PAUSED, (R.INGESTING, R.NO_WORKER))


def test_a_paused_run_is_not_held_by_what_workers_said_before() -> None:
    wait = run_wait(run(paused=True), crew(worker(lane(R.MAX_INFLIGHT))), NOW)
    assert wait is not None
    assert wait.others == ()


def test_a_silent_worker_may_be_all_there_is() -> None:
    wait = run_wait(run(), crew(worker(lane(in_flight=1), age=4 * BEAT)), NOW)
    assert wait is not None
    assert (wait.reason, wait.since) == (R.NO_WORKER, NOW - 4 * BEAT)
    assert wait.others == (R.CLAIMS_HELD,)


def test_a_reason_older_than_two_heartbeats_says_so() -> None:
    old = worker(lane(R.MAX_INFLIGHT, in_flight=20), age=2 * BEAT + 1)
    wait = run_wait(run(), crew(old), NOW)
    assert wait is not None
    assert wait.detail == "the cap is in use: 20 of 20; so it was more than 2 heartbeats ago"
    fresh = worker(lane(R.MAX_INFLIGHT, in_flight=20), name="V")
    both = run_wait(run(), crew(old, fresh), NOW)
    assert both is not None
    assert both.detail == "the cap is in use: 20 of 20"


def test_hosts_that_cool_down_are_told_only_if_all_rows_left_are_theirs() -> None:
    host = worker(lane(R.HOST_CLOSED, put_off=2, until=LATER))
    other = worker(lane(R.RETRY_BACKOFF, put_off=3, until=LATER - 1), name="V")
    wait = run_wait(run(done=95), crew(host, other), NOW)
    assert wait is not None
    assert (wait.reason, wait.until) == (R.RETRY_BACKOFF, LATER - 1)
    assert wait.detail == "every task left waits for its next attempt: 5 tasks"
    assert wait.others == ()


@pytest.mark.parametrize("reason", [R.RETRY_BACKOFF, R.HOST_CLOSED, R.CLAIMS_HELD])
def test_rows_that_wait_are_told_until_the_next_report(reason: RunWaitReason) -> None:
    seen = worker(lane(reason, put_off=90, until=NOW - 1), age=BEAT)
    wait = run_wait(run(), crew(seen), NOW)
    assert wait is not None
    assert (wait.reason, wait.until) == (reason, None)
    fewer = run_wait(run(done=97), crew(seen), NOW)
    assert fewer is not None
    assert fewer.detail.endswith(": 3 tasks")


def test_workers_that_wait_for_several_reasons_make_one_of_all_rows_left() -> None:
    host = worker(lane(R.HOST_CLOSED, put_off=2, until=LATER))
    claim = worker(lane(R.CLAIMS_HELD, put_off=3, until=LATER - 1), name="V")
    wait = run_wait(run(done=95), crew(host, claim), NOW)
    assert wait is not None
    assert (wait.reason, wait.until, wait.others) == (R.RETRY_BACKOFF, LATER - 1, ())
    assert wait.detail == "every task left waits for its next attempt: 5 tasks"


def test_an_outage_is_told_as_what_it_is() -> None:
    seen = worker(lane(R.GATEWAY_THROTTLED), away=("network", "gateway", "result store"))
    wait = run_wait(run(), crew(seen), NOW)
    assert wait is not None
    assert wait.detail == (
        "calls fail for want of the gateway and the network: one trial call a second of each worker"
    )


def test_claims_that_a_worker_met_are_told_while_nothing_is_at_work() -> None:
    seen = worker(lane(R.CLAIMS_HELD, put_off=2, until=LATER))
    wait = run_wait(run(done=98), crew(seen), NOW)
    assert wait is not None
    assert (wait.reason, wait.until) == (R.CLAIMS_HELD, LATER)


def test_a_run_that_no_worker_has_a_lane_for_waits_for_slots_that_are_all_taken() -> None:
    wait = run_wait(run(), crew(worker(in_use=4)), NOW)
    assert wait is not None
    assert (wait.reason, wait.since) == (R.SLOTS, NOW - 500)


def test_the_specification_lists_the_reasons_in_their_order() -> None:
    rows = table("Reason of a run", "It is so when")
    assert [row[0].strip("`") for row in rows] == [reason.value for reason in RunWaitReason]


def test_the_cap_of_a_caller_is_told_as_such() -> None:
    reached = worker(lane(R.MAX_INFLIGHT, in_flight=5, caller_limit=1_200))
    at_its_own = worker(lane(R.MAX_INFLIGHT, in_flight=5), name="V")
    wait = run_wait(run(), crew(at_its_own, reached), NOW)

    assert wait is not None
    assert wait.reason is R.MAX_INFLIGHT
    assert wait.detail == ("the cap of the caller is in use, over all of its jobs: 1,200 of 1,200")
