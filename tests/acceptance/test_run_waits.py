"""Waits of runs, brought about on a real development server, and read from API and terminal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from zenrows.batch import ZenRowsBatchClient

from conveyor.domain.run_waits import RunWaitReason
from conveyor.testing.local_server import ConveyorServer
from tests.acceptance import support_models
from tests.acceptance.support_boot import boot
from tests.acceptance.support_cli import CLIENT, conveyor, environment
from tests.acceptance.support_held import HeldCalls, held_server
from tests.acceptance.support_site import in_background
from tests.acceptance.support_waits import nothing_holds, said, told
from tests.acceptance.support_wire import KEY, Wire, eventually
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]
extended = pytest.mark.extended

R = RunWaitReason
CHECKED = {"event_hooks": {"response": [support_models.check]}}
SLOTS = 4


@contextmanager
def held(directory: Path, **settings: Any) -> Iterator[tuple[ConveyorServer, Wire, HeldCalls]]:
    """A server of four slots whose calls are held, and a caller of it."""
    with (
        held_server(directory, **{"workers": SLOTS, "async_threshold": 10, **settings}) as (
            server,
            calls,
        ),
        Wire(server.base_url) as wire,
    ):
        yield server, wire, calls


def pages(server: ConveyorServer, name: str, count: int) -> list[str]:
    return [server.url(f"{name}/{number}", delay=60) for number in range(count)]


def test_a_cap_in_use_is_told_until_nothing_holds(tmp_path: Path) -> None:
    with held(tmp_path) as (server, wire, calls):
        job = wire.submit(pages(server, "capped", 5), max_inflight=2)["job_id"]
        run = told(wire, server.base_url, job, R.MAX_INFLIGHT)
        assert run["waiting"]["detail"] == "the cap is in use: 2 of 2"
        assert "until" not in run["waiting"]
        with ZenRowsBatchClient(KEY, base_url=server.base_url, httpx_args=CHECKED) as client:
            latest = client.get_job(job).data.latest_run
            assert latest is not None
            assert latest.run_id == run["run_id"]
        free = wire.submit(pages(server, "free", 2))["job_id"]
        nothing_holds(wire, free)
        calls.release()
        assert "waiting" not in wire.ended(job)


def test_slots_that_are_taken_and_a_pause_that_comes_first(tmp_path: Path) -> None:
    with held(tmp_path) as (server, wire, _):
        wire.submit(pages(server, "first", 2 * SLOTS), max_inflight=SLOTS)
        eventually(lambda: server.hits.in_flight == SLOTS or None, "every slot is taken")
        job = wire.submit(pages(server, "second", 3))["job_id"]
        run = told(wire, server.base_url, job, R.SLOTS)
        assert run["waiting"]["detail"] == (
            "every slot is taken: 4 slots of 1 worker, 0 of them by this run"
        )
        explained = conveyor(server, "explain", job, "--json")
        assert json.loads("".join(explained.out))["command"] == "conveyor-dev --workers N"
        assert wire.ask("POST", f"/jobs/{job}/pause")["waiting"]["reason"] == R.PAUSED
        told(wire, server.base_url, job, R.PAUSED)
        assert wire.ask("POST", f"/jobs/{job}/resume")["waiting"]["reason"] == R.SLOTS


@extended
def test_a_reader_that_leaves_while_a_run_is_watched_ends_it_in_silence(tmp_path: Path) -> None:
    with held(tmp_path) as (server, wire, _):
        job = wire.submit(pages(server, "watched", 3), max_inflight=2)["job_id"]
        with subprocess.Popen(
            [*CLIENT, "watch", job],
            env=environment(server),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stdout is not None
            assert watching.stderr is not None
            assert watching.stdout.readline().startswith("running: 0/3 done")
            watching.stdout.close()
            # The next line comes while the stream is followed.
            assert watching.wait(SECONDS) == 1
            assert watching.stderr.read() == ""


@extended
def test_rows_that_are_not_written_yet(tmp_path: Path) -> None:
    with held(tmp_path) as (server, wire, calls):
        job = wire.submit(pages(server, "again", 12), max_inflight=1)["job_id"]
        eventually(lambda: server.hits.in_flight or None, "a call is under way")
        wire.ask("POST", f"/jobs/{job}/stop")
        # The copy of so many rows comes later, and waits for the call.
        made = wire.ask("POST", f"/jobs/{job}/rerun")
        assert made["latest_run"]["waiting"]["reason"] == R.INGESTING
        run = told(wire, server.base_url, job, R.INGESTING)
        assert run["waiting"]["detail"].endswith(": 0 of 12")
        wire.ask("POST", f"/jobs/{job}/pause")
        told(wire, server.base_url, job, R.PAUSED, R.INGESTING)
        wire.ask("POST", f"/jobs/{job}/resume")
        calls.release()
        wire.ended(job)


@extended
def test_retries_that_are_not_due(tmp_path: Path) -> None:
    with held(tmp_path, retry_base=600.0) as (server, wire, _):
        urls = [server.url("bad", status=500), server.url("good")]
        job = wire.submit(urls, max_attempts=2)["job_id"]
        waiting = told(wire, server.base_url, job, R.RETRY_BACKOFF)["waiting"]
        assert waiting["detail"] == "every task left waits for its next attempt: 1 task"
        (row,) = wire.rows(job, status="processing")
        assert waiting["until"][:16] == row["waiting"]["until"][:16]


@extended
def test_a_gateway_that_refuses_for_load(tmp_path: Path) -> None:
    with held(tmp_path, retry_base=600.0) as (server, wire, _):
        job = wire.submit([server.url("full", status=429)], max_inflight=7)["job_id"]
        detail = told(wire, server.base_url, job, R.GATEWAY_THROTTLED)["waiting"]["detail"]
        assert detail == "the gateway refuses for load: 1 call at a time of 7"


class _Closed(BaseHTTPRequestHandler):
    """Asks every caller to stay away for an hour."""

    def do_GET(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "3000")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@extended
def test_hosts_that_asked_for_a_pause(tmp_path: Path) -> None:
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Closed) as site,
        in_background(site),
        boot(tmp_path, gateway="direct", allow_private="true", workers=1) as server,
        Wire(server.api) as wire,
    ):
        urls = [f"http://127.0.0.1:{site.server_port}/{number}" for number in range(3)]
        job = wire.submit(urls)["job_id"]
        waiting = told(wire, server.api, job, R.HOST_CLOSED)["waiting"]
        assert (
            waiting["detail"]
            == "every task left waits for its host, which asked for a pause or is at a limit: "
            "3 tasks"
        )
        assert waiting["until"] > waiting["since"]
        _, explained = anyio.run(said, server.api, job)
        assert f"\n  such as {urls[0]}: " in explained, explained
        assert "retry_after, waits until " in explained


@extended
def test_bodies_that_cannot_be_stored(tmp_path: Path) -> None:
    with held(tmp_path, workers=1) as (server, wire, calls):
        job = wire.submit(pages(server, "lost", 3))["job_id"]
        eventually(lambda: server.hits.in_flight or None, "a call is under way")
        in_the_way = tmp_path / "blobs" / "results" / "30" / job
        in_the_way.parent.mkdir(parents=True, exist_ok=True)
        in_the_way.write_text("no directory")
        calls.release()
        run = told(wire, server.base_url, job, R.BODIES_NOT_KEPT)
        assert run["waiting"]["detail"].endswith(": 1 of 1 worker")
        assert wire.latest_run(job)["outage"]["shared"] == "result store"
        in_the_way.unlink()
        nothing_holds(wire, job)
        assert wire.ended(job)["stats"]["successful"] == 3


@extended
def test_explain_speaks_json_and_of_jobs_that_are_done(tmp_path: Path) -> None:
    with held(tmp_path) as (server, wire, _):
        job = wire.submit([server.url("gone", status=404)], max_attempts=1)["job_id"]
        wire.ended(job)
        command = [*CLIENT, "explain", job, "--json"]
        ran = subprocess.run(
            command, env=environment(server), capture_output=True, text=True, check=True
        )
        found = json.loads(ran.stdout)
        assert found["command"] == f"conveyor rerun {job} --failed --watch"
        assert (found["status"], found["waiting"]) == ("completed", None)
        [cause] = found["details"]
        assert cause.startswith("1 task failed: ")
        assert f", 404), such as {server.url('gone', status=404)}" in cause
        none = conveyor(server, "explain", "7ZZ")
        assert (none.code, none.err) == (1, ["conveyor: no such job: 7ZZ"])
