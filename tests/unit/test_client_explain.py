"""`conveyor explain`: why a job is not faster, or why it stands, and the command that helps."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.client.explain import ON_THE_HOST, explain, in_development
from conveyor.client.wire import JobReply, RunReply, RunWaitReply, ScheduleReply, StatsReply
from conveyor.domain.run_waits import FLEET_PAUSED, RunWaitReason


def run(done: int = 3, total: int = 10, *, failed: int = 0, **fields: Any) -> RunReply:
    stats = StatsReply(total=total, completed=done, successful=done - failed, failed=failed)
    return RunReply(run_id="R", job_id="J", stats=stats, **{"status": "running", **fields})


def job(latest: RunReply | None = None, **fields: Any) -> JobReply:
    return JobReply(
        job_id="J", latest_run=latest, max_inflight=20, **{"status": "closed", **fields}
    )


@pytest.mark.parametrize("reason", RunWaitReason)
def test_each_reason_is_told_with_what_helps(reason: RunWaitReason) -> None:
    wait = RunWaitReply(reason=reason, since="S", detail="the cap is in use: 2 of 2", until="U")
    found = explain(job(run(waiting=wait)))
    assert found.why == (
        "3 of 10 tasks done; it waits because the cap is in use: 2 of 2 "
        f"({reason}, since S, until U)"
    )
    assert found.words
    helping = {
        RunWaitReason.PAUSED: ("resume", "J"),
        RunWaitReason.MAX_INFLIGHT: ("submit", "FILE", "--max-inflight", "40"),
        RunWaitReason.NO_WORKER: ("worker",),
        RunWaitReason.SLOTS: ("worker",),
        RunWaitReason.BODIES_NOT_KEPT: ("admin", "check"),
        RunWaitReason.HOST_CLOSED: ("results", "J"),
        RunWaitReason.RETRY_BACKOFF: ("results", "J"),
    }
    assert found.words == helping.get(reason, ("watch", "J"))


def test_a_paused_fleet_is_not_helped_by_resuming_a_job() -> None:
    wait = RunWaitReply(reason=RunWaitReason.PAUSED, detail=FLEET_PAUSED)
    assert explain(job(run(waiting=wait))).words == ("admin", "resume", "--fleet")


@pytest.mark.parametrize("reason", RunWaitReason)
def test_no_command_for_production_helps_a_development_server(reason: RunWaitReason) -> None:
    found = job(run(waiting=RunWaitReply(reason=reason, detail="it waits")))
    explained = explain(found)
    if explained.words[0] in ON_THE_HOST:
        told = in_development(found, explained)
        assert (told.why, told.words) == (explained.why, ())
        assert told.helps
        assert not told.program or told.program.startswith("conveyor-dev")


SCHEDULE = ScheduleReply(at="2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("found", "why", "words"),
    [
        (job(run()), "3 of 10 tasks done; nothing holds it back", ("watch", "J")),
        (job(run(10, status="completed")), "completed: 10 tasks, 10 ok, 0 failed",
         ("results", "J")),
        (job(run(10, failed=2, status="completed")), "completed: 10 tasks, 8 ok, 2 failed",
         ("rerun", "J", "--failed", "--watch")),
        (job(run(3, status="stopped")), "stopped: 10 tasks, 3 ok, 0 failed, 7 not done",
         ("rerun", "J", "--unfinished", "--watch")),
        (job(run(3, failed=1, status="failed", failure_reason="insufficient_credits")),
         "failed: 10 tasks, 2 ok, 1 failed, 7 not done; insufficient_credits",
         ("rerun", "J", "--failed", "--unfinished", "--watch")),
        (job(run(10, status="completed"), schedule=SCHEDULE, next_scheduled_run="N"),
         "completed: 10 tasks, 10 ok, 0 failed; the next run begins at N", ("results", "J")),
        (job(run(10, status="pending"), status="open"),
         "10 of 10 tasks done, and the job is open: it waits for more tasks, or for "
         "POST /v1/jobs/J/close, which ends it", ()),
        (job(run(), status="deleted"), "deleted; what is left of it is being removed", ()),
        (job(), "all its runs are deleted", ("rerun", "J")),
        (job(schedule=SCHEDULE, next_scheduled_run="N"), "it fires first at N",
         ("schedule", "show", "J")),
        (job(schedule=SCHEDULE, schedule_state="paused"),
         "its schedule is paused, and it never ran", ("schedule", "resume", "J")),
        (job(schedule=SCHEDULE), "it never ran, and no fire follows", ("schedule", "show", "J")),
    ],
    ids=["works", "done", "failures", "stopped", "account", "fires again", "open", "deleted",
         "no run", "fires", "paused schedule", "never"],
)  # fmt: skip
def test_every_other_state_is_explained(found: JobReply, why: str, words: tuple[str, ...]) -> None:
    explained = explain(found)
    assert (explained.why, explained.words) == (why, words)


def test_a_reason_of_a_newer_server_is_told_as_it_is() -> None:
    wait = RunWaitReply(reason="new\x1b[2J", detail="something new")
    found = explain(job(run(waiting=wait)))
    assert found.why == "3 of 10 tasks done; it waits because something new (new\\x1b[2J)"
    assert found.words == ("watch", "J")
