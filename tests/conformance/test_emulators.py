"""The start and end of the services under test."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conformance import emulators
from tests.conformance.emulators import PROGRAM, ROOT, VENV, address, unavailable

ASKS = """
import sys
from tests.conformance.emulators import address
print(address("CONVEYOR_TEST_REDIS"), flush=True)
sys.stdin.read()
"""
GOES = 20.0


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def installed() -> None:
    if not (VENV / ".conveyor").exists():
        unavailable("there are no emulators: ./scripts/emulators installs them")


def without_services() -> dict[str, str]:
    """This process's environment, in which no service is named."""
    return {name: text for name, text in os.environ.items() if not name.startswith("CONVEYOR_TEST")}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_an_emulator_starts_when_asked_for_and_ends_with_who_asked(
    installed: None, how: signal.Signals | None
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=without_services(),
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = port_of(child.stdout.readline())
        assert answers(port)
        child.stdin.close() if how is None else child.send_signal(how)
        child.wait(GOES)
    deadline = time.monotonic() + GOES
    while answers(port) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not answers(port)


def test_a_command_finds_what_is_named_and_the_rest_started(installed: None) -> None:
    named = dict.fromkeys(("DYNAMODB", "STEPFUNCTIONS", "KMS", "S3"), "http://localhost:1")
    environment = without_services() | {f"CONVEYOR_TEST_{k}": url for k, url in named.items()}
    prints = "import os; print(*(os.environ[f'CONVEYOR_TEST_{s}'] for s in ('S3', 'REDIS', 'SQS')))"
    ran = subprocess.run(
        [sys.executable, PROGRAM, VENV, "run", sys.executable, "-c", prints],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    s3, *started = ran.stdout.split()
    assert s3 == named["S3"]
    assert [port_of(url) > 1 for url in started] == [True, True]
    assert not any(answers(port_of(url)) for url in started)


@pytest.mark.slow
def test_an_emulator_that_ended_leaves_no_file(installed: None) -> None:
    before = {*Path("/tmp").glob("*.sock")}  # killed ones may have left some of the same ports
    with (
        # The path of a socket must be short; pytest's are not.
        tempfile.TemporaryDirectory() as temporary,
        subprocess.Popen(
            [sys.executable, PROGRAM, VENV, "hold", "S3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**without_services(), "TMPDIR": temporary},
        ) as holder,
    ):
        assert holder.stdout is not None
        assert "S3" in json.loads(holder.stdout.readline())
        [directory] = Path(temporary).iterdir()
        ports = _ports_of(directory)
        sockets = {path for port in ports for path in Path("/tmp").glob(f"*-{port}.sock")} - before
        assert sockets
        holder.communicate()
        assert [path for path in sockets if path.exists()] == []
        assert [*Path(temporary).iterdir()] == []


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("1", 1)])
def test_what_cannot_be_started_is_named_and_ends_a_run_of_ci(
    tmp_path: Path, ci: str, code: int
) -> None:
    ran = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, "run", "true"],
        capture_output=True,
        text=True,
        env=without_services() | {"CI": ci},
        timeout=60,
        check=False,
    )
    named = [line for line in ran.stderr.splitlines() if "NOT STARTED" in line]
    assert len(named) == (1 if ci else 4)
    assert named[0].endswith(
        f"(DYNAMODB, STEPFUNCTIONS, KMS): there is no ministack in {tmp_path.name}"
    )
    assert ran.returncode == code


def test_an_emulator_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("ministack", "python"):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\necho no room\nexit 3\n")
        program.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, "hold", "DYNAMODB"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "it ended with 3\n    no room" in ran.stderr


def test_on_aws_nothing_is_started_and_no_key_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVEYOR_TEST_AWS", "1")
    monkeypatch.delenv("CONVEYOR_TEST_DYNAMODB", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the account's own")
    assert address("CONVEYOR_TEST_DYNAMODB") == ""
    assert os.environ["AWS_ACCESS_KEY_ID"] == "the account's own"


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_test_without_its_service_is_skipped_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(emulators, "missing", [])
    with pytest.raises(outcome, match="why"):
        unavailable("why")
    assert emulators.missing == ["why"]


def _ports_of(directory: Path) -> list[str]:
    """The ports of the program that writes its log below a directory."""
    [words] = [
        words
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"-logdir={directory}/" in (words := _read(path))
    ]
    return re.findall(r"\.port(?:\.grpc)?=(\d+)", words)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
