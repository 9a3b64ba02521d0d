"""The programs with streams, terminals and servers that are not as usual."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from conveyor.demo.site import pages
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_cli import (
    CLIENT,
    SERVER,
    conveyor,
    dev,
    environment,
    free_port,
    in_shell,
    lines_until,
    wait_for,
)
from tests.patient import SECONDS

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def test_a_closed_stream_leads_nowhere(server: ConveyorServer) -> None:
    job_id = conveyor(server, "submit", server.url("closed"), "--watch").job_id
    assert in_shell(server, ">&-", "jobs") == (0, [])
    assert in_shell(server, "<&- >&-", "results", job_id) == (0, [])
    assert in_shell(server, "2>&-", "watch", "nosuch") == (1, [])


def test_a_full_disk_is_one_line(server: ConveyorServer) -> None:
    conveyor(server, "submit", server.url("full"), "--watch")
    for arguments in (["jobs"], ["jobs", "--jsonl"], ["--version"]):
        expected = (1, ["conveyor: No space left on device"])
        assert in_shell(server, ">/dev/full", *arguments) == expected
    assert in_shell(server, "2>/dev/full", "watch", "nosuch") == (1, [])


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_a_server_without_streams_serves_and_ends_in_order(
    tmp_path: Path, redirection: str
) -> None:
    port = free_port()
    flags = ["--gateway", "fake", "--port", str(port), "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(["sh", "-c", f'exec "$@" {redirection}', "sh", *SERVER, *flags]) as mute:
        try:
            wait_for(f"http://127.0.0.1:{port}/readyz")
        finally:
            mute.send_signal(signal.SIGINT)
        assert mute.wait(timeout=60) == 0


def test_what_was_not_found_is_named(server: ConveyorServer) -> None:
    here = conveyor(server, "submit", server.url("here"), "--watch").job_id
    ran = conveyor(server, "rm", here, "not-a-job")
    assert (ran.code, ran.out) == (1, [f"job {here}: deleted"])
    assert ran.err == ["conveyor: no such job: not-a-job"]
    unknown = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    for arguments in (["watch"], ["results"], ["resume"], ["rerun"], ["results", "--out", "."]):
        ran = conveyor(server, arguments[0], unknown, *arguments[1:])
        assert (ran.code, ran.err) == (1, [f"conveyor: no such job: {unknown}"])


@contextmanager
def interrupted(server: ConveyorServer, *arguments: str) -> Iterator[list[str]]:
    """Ctrl-C a command after its first line; gives what standard error got."""
    with subprocess.Popen(
        [*CLIENT, *arguments],
        env=environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    yield err.splitlines()


def paused_job(server: ConveyorServer, urls: list[str]) -> str:
    """A job that is paused before its tasks are done, however long a command takes to start."""
    headers = {"X-API-Key": server.api_key}
    with httpx.Client(
        base_url=server.base_url, headers=headers, timeout=SECONDS, trust_env=False
    ) as client:
        tasks = [{"url": url} for url in urls]
        made = client.post("/jobs", json={"tasks": tasks, "max_inflight": 1})
        job_id: str = made.json()["job_id"]
        assert client.post(f"/jobs/{job_id}/pause").json()["pause_state"] == "paused"
    return job_id


def test_fetching_results_waits_for_the_end_and_tells_how_to_come_back(
    server: ConveyorServer, tmp_path: Path
) -> None:
    job_id = paused_job(server, [server.url(f"wait{number}", delay=0.3) for number in range(4)])
    out = str(tmp_path / "a b")
    flags = (job_id, "--status", "successful", "--out", out, "--server", server.base_url)
    with interrupted(server, "results", *flags, "--api-key", server.api_key) as shown:
        assert shown == [
            "conveyor: interrupted; the job goes on. Come back with: conveyor results "
            f"{job_id} --status successful --server {server.base_url} --out '{out}'"
        ]
    conveyor(server, "resume", job_id)
    ran = conveyor(server, "results", *flags)
    assert (ran.code, ran.err) == (0, [])
    assert ran.out[-1] == f"4 files in {out}"
    assert len(list(Path(out).glob("0*"))) == 4
    # A run that is over is not waited for.
    assert conveyor(server, "results", *flags).out == ran.out[-1:]


def test_the_successful_part_of_a_stopped_run_is_not_the_whole(
    server: ConveyorServer, tmp_path: Path
) -> None:
    job_id = conveyor(server, "submit", server.url("stopped", delay=600)).job_id
    conveyor(server, "stop", job_id)
    flags = ("--status", "successful", "--out", str(tmp_path))
    assert conveyor(server, "results", job_id, *flags).code == 3


def test_the_list_of_jobs_says_whose_time_it_shows(server: ConveyorServer) -> None:
    job_id = conveyor(server, "submit", server.url("when"), "--watch").job_id
    header, first, *_ = conveyor(server, "jobs").out
    assert first.startswith(job_id)
    time = re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first)
    assert time is not None
    assert header[time.start() : time.end()].strip() == "created, UTC"


def test_a_directory_that_cannot_be_written_costs_no_scrape(server: ConveyorServer) -> None:
    url = server.url("unwritten")
    ran = conveyor(server, "submit", url, "--out", "/dev/null/x")
    assert (ran.code, ran.out, len(ran.err)) == (1, [], 1)
    assert url not in server.hits.counts


def test_a_taken_port_has_a_way_out_and_an_unknown_host_a_reason(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "used", "--gateway", "fake") as first:
        port = first.info.api.split(":")[2].removesuffix("/v1")
        ran = dev(tmp_path / "new", "--port", port)
        assert ran.err == [
            f"conveyor-dev: port {port} of 127.0.0.1 is taken (--port 0 picks a free one)"
        ]
    ran = dev(tmp_path / "new", "--host", "nosuch.invalid")
    assert ran.err[0].startswith("conveyor-dev: cannot listen on port 9000 of nosuch.invalid: ")
    assert not ran.err[0].endswith("None")


@pytest.mark.slow
@pytest.mark.extended
def test_a_second_demonstration_is_one_line_and_its_json_is_alone(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    bare = {name: text for name, text in os.environ.items() if name != "ZENROWS_API_KEY"}
    bare["CONVEYOR_PORT"] = str(free_port())
    with subprocess.Popen(
        [*SERVER, "--demo", "--json", "--data-dir", data],
        env=bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        lines_until(first.stderr, "still serving")
        second = subprocess.run(
            [*SERVER, "--demo", "--data-dir", data],
            env=bare,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        listed = subprocess.run(
            [*CLIENT, "jobs", "--server", f"127.0.0.1:{bare['CONVEYOR_PORT']}", "--jsonl"],
            env=bare,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        first.send_signal(signal.SIGINT)
        out, _err = first.communicate(timeout=60)
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (1, "", 1)
    assert "in use" in second.stderr
    (job,) = map(json.loads, listed.stdout.splitlines())
    assert job["latest_run"]["stats"]["successful"] == len(pages())
    assert json.loads(out)["api"].endswith(f":{bare['CONVEYOR_PORT']}/v1")
