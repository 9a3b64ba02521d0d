"""`conveyor explain`: why a job is not faster, or why it stands, and the command that helps."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.client.explain import (
    HOSTS_SHOWN,
    ON_THE_HOST,
    OUTAGE_FIRST,
    explain,
    failing,
    held_back,
    in_development,
    may_be_held,
    may_tell_failures,
)
from conveyor.client.wire import (
    HostReply,
    HostsReply,
    JobReply,
    OutageReply,
    RunReply,
    RunWaitReply,
    ScheduleReply,
    StatsReply,
)
from conveyor.domain.run_waits import FLEET_PAUSED, FOR_WANT_OF, RunWaitReason
from conveyor.ports.gateway import Shared


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


def test_what_helps_a_development_server_leaves_the_details_there() -> None:
    found = job(run(4, failed=4, waiting=RunWaitReply(reason=RunWaitReason.SLOTS, detail="full")))
    assert found.latest_run is not None
    explained = failing(found.latest_run, explain(found), ["a cause"])
    assert in_development(found, explained).details == ("a cause",)


UNRESOLVED = "the gateway https://api.example/v1/ cannot be reached: the host name has no address"
AT_ONCE = [None, *(one for one in RunWaitReason if one in OUTAGE_FIRST)]
LATER = [one for one in RunWaitReason if one not in OUTAGE_FIRST]


def away(shared: str = "gateway", reason: str | None = None, **fields: Any) -> JobReply:
    wait = None if reason is None else RunWaitReply(reason=reason, detail="the wait", since="T")
    outage = OutageReply(shared=shared, detail=UNRESOLVED, since="S", **fields)
    return job(run(outage=outage, waiting=wait))


@pytest.mark.parametrize("reason", AT_ONCE)
def test_an_outage_is_told_by_its_cause_with_what_to_check(reason: str | None) -> None:
    found = explain(away(reason=reason))
    assert found.why == f"3 of 10 tasks done; {UNRESOLVED} (since S)"
    assert "--gateway" in found.helps
    assert "network" in found.helps
    assert found.words == ("watch", "J")


def test_an_outage_that_nothing_preceded_is_told_as_such() -> None:
    found = explain(away(never_answered=True))
    assert found.why.endswith(" (since S; nothing has answered since the server started)")


@pytest.mark.parametrize("reason", LATER)
def test_an_outage_does_not_hide_a_reason_that_comes_before_it(reason: str) -> None:
    assert f"the wait ({reason}" in explain(away(reason=reason)).why


@pytest.mark.parametrize("shared", [one.value for one in Shared])
def test_each_outage_has_its_own_help_and_only_the_gateways_own_asks_for_its_address(
    shared: str,
) -> None:
    helps = explain(away(shared)).helps
    assert ("--gateway" in helps) is (shared == "gateway")
    assert helps != explain(away("some part of a later server")).helps


def test_of_a_store_that_is_away_it_is_told_what_that_is_for() -> None:
    why = explain(away("result store")).why
    assert why == f"3 of 10 tasks done; bodies cannot be stored: {UNRESOLVED} (since S)"


def test_hosts_are_not_looked_for_while_something_is_away() -> None:
    latest = away().latest_run
    assert latest is not None
    assert not may_be_held(latest)


def test_an_outage_that_only_the_workers_know_is_not_told_as_throttling() -> None:
    detail = f"{FOR_WANT_OF}gateway: one trial call a second of each worker"
    wait = RunWaitReply(reason=RunWaitReason.GATEWAY_THROTTLED, detail=detail)
    found = explain(job(run(waiting=wait)))
    assert found.why == f"3 of 10 tasks done; it waits because {detail} (gateway_throttled)"
    assert "as fast as" not in found.helps
    assert "network" in found.helps


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


def hosts(number: int, *, counted: int = 10, more: int = 0) -> HostsReply:
    found = (
        HostReply(host=f"h{n}.test:443", pending=4, claimed=0, done=0, failed=0, limit=2,
                  detail="at most 2 calls at a time")
        for n in range(number)
    )  # fmt: skip
    return HostsReply(
        run_id="R", tasks=10, counted_tasks=counted, hosts=tuple(found), more_hosts=more
    )


LINE = "4 tasks wait; at most 2 calls at a time"


def test_a_run_at_the_limits_of_its_hosts_is_explained_by_them() -> None:
    found = job(run())
    told = held_back(found, explain(found), hosts(1))
    assert told.why == "3 of 10 tasks done; its host holds it back"
    assert told.details == (f"h0.test:443: {LINE}",)
    assert told.words == ("hosts", "J")


def test_few_hosts_are_named_and_a_part_that_was_counted_is_told() -> None:
    found = job(run())
    told = held_back(found, explain(found), hosts(5, counted=4, more=7))
    assert told.why == "3 of 10 tasks done; its hosts hold it back"
    named = [f"h{n}.test:443: {LINE}" for n in range(HOSTS_SHOWN)]
    assert list(told.details) == [*named, "and 9 more hosts", "counted among 4 of 10 tasks"]


def test_a_run_whose_hosts_are_closed_is_explained_by_them_too() -> None:
    wait = RunWaitReply(reason=RunWaitReason.HOST_CLOSED, since="S", detail="it is closed")
    found = job(run(waiting=wait))
    told = held_back(found, explain(found), hosts(1))
    assert told.why == "3 of 10 tasks done; its host holds it back"
    assert told.details == (f"h0.test:443: {LINE}",)
    assert held_back(found, explain(found), hosts(0)).why == (
        "3 of 10 tasks done; it waits because it is closed (host_closed, since S)"
    )


def test_a_run_that_no_host_holds_back_is_explained_as_before() -> None:
    found = job(run())
    assert held_back(found, explain(found), hosts(0)) == explain(found)


def test_hosts_are_asked_for_only_where_nothing_else_holds_a_run_back() -> None:
    def waiting(reason: RunWaitReason) -> RunReply:
        return run(waiting=RunWaitReply(reason=reason, detail="it waits"))

    asked = {reason for reason in RunWaitReason if may_be_held(waiting(reason))}
    assert asked == {RunWaitReason.HOST_CLOSED}
    assert may_be_held(run())
    assert not may_be_held(run(pause_state="paused"))
    assert not may_be_held(run(10, status="completed"))


def test_failures_explain_a_run_that_ended_and_a_live_one_of_which_most_fail() -> None:
    assert may_tell_failures(run(10, failed=1, status="completed"))
    assert not may_tell_failures(run(10, status="completed"))
    assert may_tell_failures(run(4, failed=2))
    assert not may_tell_failures(run(5, failed=2))


def test_causes_stand_below_what_a_run_does() -> None:
    ended, live = run(10, failed=10, status="completed"), run(4, failed=2)
    told = failing(ended, explain(job(ended)), ["a cause"])
    assert (told.why, told.details) == ("completed: 10 tasks, 0 ok, 10 failed", ("a cause",))
    told = failing(live, explain(job(live)), ["a cause"])
    assert told.why == "4 of 10 tasks done; nothing holds it back; 2 of those done failed"
