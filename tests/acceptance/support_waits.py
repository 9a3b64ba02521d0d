"""The reasons for waits, read wherever they are told: by routes with runs, and in a terminal."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import anyio
import httpx

from conveyor.client.api import connect
from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.explain import explain_job
from conveyor.client.progress import LineView
from conveyor.client.watch import follow, latest_run
from conveyor.clock import SystemClock
from conveyor.domain.run_waits import RunWaitReason
from tests.acceptance.support_wire import KEY, Wire, eventually
from tests.patient import SECONDS


def told(wire: Wire, api: str, job_id: str, reason: RunWaitReason, *others: RunWaitReason) -> Any:
    """Wait until a run waits for a reason, and for these others if some are named, and read it
    everywhere; the run."""

    def look() -> Any:
        run = wire.latest_run(job_id)
        waiting = run.get("waiting", {})
        there = tuple(waiting.get("others", ())) if others else ()
        return run if (waiting.get("reason"), there) == (reason, others) else None

    run = eventually(look, f"the run waits because of {reason}, and of {others}")
    path = f"/jobs/{job_id}/runs"
    jobs = {job["job_id"]: job for job in wire.ask("GET", "/jobs")["jobs"]}
    for shown in (
        wire.ask("GET", f"{path}/{run['run_id']}"),
        wire.ask("GET", path)["runs"][0],
        jobs[job_id]["latest_run"],
    ):
        assert shown["waiting"]["reason"] == reason
    page = httpx.get(
        f"{api.removesuffix('/v1')}/dashboard/jobs/{job_id}", trust_env=False, timeout=SECONDS
    )
    if page.status_code != 404:  # a fleet serves no pages
        assert f">{reason.replace('_', ' ')}, since " in page.text
    watched, explained = anyio.run(said, api, job_id)
    detail = run["waiting"]["detail"]
    assert f"; waiting because {reason}: {detail}" in watched, watched
    because = f"it waits because {detail} ({reason}, since "
    if "outage" in run:  # told in place of the reason that comes of it
        because = f"{run['outage']['detail']} (since "
    assert because in explained, explained
    return run


async def said(api: str, job_id: str) -> tuple[str, str]:
    """Return what `watch` says at first, and what `explain` says, to something that is no terminal:
    the code of the commands, without a process each."""
    clock, watched, explained = SystemClock(), io.StringIO(), io.StringIO()
    async with connect(api, KEY, clock) as client, anyio.create_task_group() as group:
        run = await latest_run(client, job_id)
        group.start_soon(follow, client, run, LineView(watched))
        while "\n" not in watched.getvalue():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    with redirect_stdout(explained):
        await explain_job(ServerTarget(api, KEY, clock), Terminal(), job_id)
    return watched.getvalue(), explained.getvalue()


def nothing_holds(wire: Wire, job_id: str) -> None:
    """Wait until nothing holds a run back."""
    eventually(lambda: "waiting" not in wire.latest_run(job_id) or None, "nothing holds the run")
