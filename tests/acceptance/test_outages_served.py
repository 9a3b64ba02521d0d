"""Real processes lose what all tasks share, and no task pays for it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_cli import CLIENT, free_port
from tests.acceptance.support_site import Page, serving_site
from tests.acceptance.support_wire import Wire, eventually
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(180)]


@contextmanager
def gateway_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway on that port, killed at the exit."""
    command = [sys.executable, "-m", "conveyor.testing.gateway_server", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["url"]
        try:
            yield child
        finally:
            child.kill()


def away(server: Booted) -> list[str]:
    """The services that /readyz names as away."""
    answer = fetched(f"{server.origin}/readyz")
    assert answer.status_code == 200
    found: list[str] = answer.json().get("away", [])
    return found


def test_a_gateway_that_is_killed_and_comes_back_costs_no_attempt(tmp_path: Path) -> None:
    port, tasks = free_port(), 600
    settings = {"gateway": f"http://127.0.0.1:{port}/v1/", "workers": 20}
    with boot(tmp_path, **settings) as server, Wire(server.api) as caller:
        with gateway_process(port):
            urls = [f"http://any.test/{number}?delay=0.1" for number in range(tasks)]
            job = caller.submit(urls, max_attempts=1)["job_id"]
            eventually(
                lambda: caller.latest_run(job)["stats"]["successful"] > 50 or None, "it runs"
            )
        outage = eventually(lambda: caller.latest_run(job).get("outage"), "the run says it waits")
        assert outage["shared"] == "gateway"
        assert f"127.0.0.1:{port}" in outage["detail"]
        assert away(server) == ["gateway"]
        with gateway_process(port):
            run = caller.ended(job)
        assert (run["stats"]["successful"], run["stats"]["failed"]) == (tasks, 0)
        assert away(server) == []


def test_slots_are_bounded_by_the_files_that_may_be_open(tmp_path: Path) -> None:
    with serving_site() as site:
        urls = [site.put(f"/{number}", Page(b"page")) for number in range(1_000)]
        (tmp_path / "urls.txt").write_text("\n".join(urls))
        command = [
            *CLIENT, "run", str(tmp_path / "urls.txt"), "-o", str(tmp_path / "out"),
            "--gateway", "direct", "--allow-private", "--workers", "600",
            "--max-inflight", "600", "--max-attempts", "1",
        ]  # fmt: skip
        limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
        ran = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "of 600 slots: this process may open 256 files" in ran.stderr
    assert "1,000 ok, 0 failed" in ran.stdout


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="takes files from a running process")
def test_files_that_run_out_cost_no_attempt(tmp_path: Path) -> None:
    tasks = 400
    with (
        serving_site() as site,
        boot(tmp_path, gateway="direct", allow_private="true", workers=20) as server,
        Wire(server.api) as caller,
    ):
        urls = [site.put(f"/{number}", Page(b"page")) for number in range(tasks)]
        caller.submit(urls[:1])
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        # The connections of the test are open already; no other file can be opened from now on.
        caller.nothing_in_hand()
        used = len(os.listdir(f"/proc/{server.pid}/fd"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used - 5, before[1]))
        job = caller.submit(urls, max_attempts=1)["job_id"]
        outage = eventually(lambda: caller.latest_run(job).get("outage"), "the run says it waits")
        assert outage["shared"] in ("file descriptors", "result store")
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        run = caller.ended(job)
        assert (run["stats"]["successful"], run["stats"]["failed"]) == (tasks, 0)
