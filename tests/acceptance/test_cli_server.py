"""The development server as a person runs it: ports, signals, silence, the demonstration."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from conveyor.demo.site import pages
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_cli import SERVER, dev, free_port, lines_until, said, wait_for
from tests.patient import SECONDS, fetched

pytestmark = pytest.mark.server


def test_a_taken_port_or_directory_is_one_line_and_touches_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = dev(tmp_path / "new", "--port", str(taken.getsockname()[1]))
    assert (ran.code, ran.out, len(ran.err)) == (1, [], 1)
    assert "taken" in ran.err[0]
    assert not (tmp_path / "new").exists()

    elsewhere = dev(tmp_path / "new", "--host", "203.0.113.1", "--port", "0")
    assert (elsewhere.code, elsewhere.out, len(elsewhere.err)) == (1, [], 1)
    assert not (tmp_path / "new").exists()

    with ServerProcess(tmp_path / "used", "--gateway", "fake") as first:
        second = dev(tmp_path / "used", "--port", "0")
        assert (second.code, second.out, len(second.err)) == (1, [], 1)
        assert fetched(first.info.api.removesuffix("/v1") + "/healthz").status_code == 200


def test_a_directory_of_a_version_before_the_first_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("00" * 32 + "\n")
    with closing(sqlite3.connect(tmp_path / "conveyor.db")) as older:
        older.execute("CREATE TABLE jobs (job_id TEXT PRIMARY KEY)")
        older.execute("PRAGMA user_version = 6")
    before = contents(tmp_path)

    ran = dev(tmp_path, "--port", "0")

    assert (ran.code, ran.out) == (1, [])
    assert ran.err == [
        f"conveyor-dev: {tmp_path}: its conveyor.db was made by a development version before 0.1.0 "
        "and cannot be read; move the directory away or name another --data-dir"
    ]
    assert contents(tmp_path) == before


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but the lock, which names the process that looked last."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    with ServerProcess(tmp_path / "data", "--gateway", "fake") as server:
        origin = server.info.api.removesuffix("/v1")
        with httpx.Client(timeout=SECONDS) as connected:
            assert connected.get(f"{origin}/readyz").status_code == 200
            server.signal(number)
            code, errors = server.wait(timeout=60)
    assert code == 0
    assert errors.splitlines() == ["stopping"]


def test_a_misspelt_variable_is_told_once_and_without_its_value(tmp_path: Path) -> None:
    with boot(tmp_path, "--gateway", "fake", permit_laese="hunter2") as server:
        written = server.output().decode()
    assert written.count("CONVEYOR_PERMIT_LAESE (did you mean CONVEYOR_PERMIT_LEASE?)") == 1
    assert "hunter2" not in written


def test_quiet_says_nothing_at_all(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(
        [*SERVER, "--quiet", "--port", str(port), "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as quiet:
        wait_for(f"http://127.0.0.1:{port}/readyz")
        quiet.send_signal(signal.SIGINT)
        shown, _ = quiet.communicate(timeout=60)
    assert (quiet.returncode, shown) == (0, b"")


@pytest.mark.slow
@pytest.mark.extended
def test_the_demonstration_survives_a_kill_and_keeps_serving(tmp_path: Path) -> None:
    of_an_earlier_one = tmp_path / "data" / "demo-results" / "01M8M35RQQ8KJR00EAWY80H5WA"
    of_an_earlier_one.mkdir(parents=True)
    with subprocess.Popen(
        [*SERVER, "--demo", "--port", "0", "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        lines = lines_until(demo.stdout, "still serving")
        assert len(lines[: lines.index("")]) <= 9
        (killed,) = (line for line in lines if line.startswith("kill -9"))
        done = int(killed.split(" at ")[1].partition(" of ")[0])
        assert 0.4 * len(pages()) <= done < len(pages())
        assert said(lines, "0 lost, 0 counted twice, with ").endswith(
            "1 × 429 and a kill -9 on the way"
        )
        job_id = said(lines, "next: conveyor results ").split()[0]
        folder = Path(said(lines, "results are in "))
        origin = said(lines, "API").removesuffix("/v1")
        assert fetched(f"{origin}/readyz").status_code == 200
        with Caller(f"{origin}/v1", "local") as caller:
            run = caller.get(f"/jobs/{job_id}")["latest_run"]
        assert run["stats"]["successful"] == len(pages())
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out, err) == (0, "stopping\n", "")
    assert folder.is_relative_to(tmp_path / "data")
    rows = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    assert {row["external_id"]: (folder / row["file"]).read_bytes() for row in rows} == pages()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demonstration_that_is_stopped_early_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [*SERVER, "--demo", "--port", "0", "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        lines_until(demo.stdout, f"{len(pages())} pages of ")
        (server,) = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out.splitlines()[-1], err) == (0, "stopping", "")
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.slow
@pytest.mark.extended
def test_a_demonstration_finds_another_port_when_its_own_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with subprocess.Popen(
            [*SERVER, "--demo", "--data-dir", str(tmp_path / "data")],
            env={**os.environ, "CONVEYOR_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as demo:
            lines = lines_until(demo.stdout, "still serving")
            demo.send_signal(signal.SIGTERM)
            demo.communicate(timeout=60)
    assert lines[0] == f"port {port} is taken; using a free one"
    assert demo.returncode == 0


def test_a_log_that_nobody_reads_stops_neither_the_server_nor_its_end(tmp_path: Path) -> None:
    port = free_port()
    origin = f"http://127.0.0.1:{port}"
    data = str(tmp_path / "data")
    with subprocess.Popen(
        [*SERVER, "--port", str(port), "--data-dir", data, "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as unread:
        wait_for(f"{origin}/readyz")
        # Each path stands in a line of the log; a pipe holds 65,536 bytes.
        long = "x" * 60_000
        with httpx.Client(timeout=SECONDS) as client:
            for _ in range(30):
                assert client.get(f"{origin}/v1/jobs/{long}").status_code == 401
            metrics = client.get(f"{origin}/metrics").text
        unread.send_signal(signal.SIGTERM)
        assert unread.wait(SECONDS) == 0

    [lost] = re.findall(r"^conveyor_log_lines_lost_total (\d+)", metrics, re.MULTILINE)
    assert 0 < int(lost) < 30
