"""Keys of `conveyor-dev`, on a real pseudo terminal below a shell with jobs."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.support_cli import CLIENT, SERVER
from tests.acceptance.support_wire import eventually
from tests.patient import SECONDS, fetched

pytestmark = [pytest.mark.server, pytest.mark.slow]

OWN_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "os.setsid()\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)
KEY = {"X-API-Key": "local"}
ENDED = r"stopping\r\n(\d\d:[^\r]*\r\n)*\$ "
"""The end of a server, whose last requests may be shown after its last word."""


class Screen:
    """A shell on a terminal of its own."""

    def __init__(self, where: Path) -> None:
        self._end, terminal = os.openpty()
        self._said = ""
        kept = {name: text for name, text in os.environ.items() if "CONVEYOR" not in name}
        seen, browser = where / "opened", where / "browser"
        browser.write_text(f'#!/bin/sh\necho "$1" >>{seen}\n')
        browser.chmod(0o755)
        self.seen = seen
        self.shell = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, "sh", "-i"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=where,
            env={**kept, "PS1": "$ ", "ENV": "", "TERM": "dumb", "BROWSER": f"{browser} %s"},
        )
        os.close(terminal)
        self.until(r"\$ ")

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._end, text.encode())

    def until(self, pattern: str) -> str:
        """Read up to this, and with it; the rest is left for the next call."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._said)) is None:
            assert time.monotonic() < deadline, (pattern, self._said)
            if select.select([self._end], [], [], 0.1)[0]:
                self._said += os.read(self._end, 4_096).decode()
        said, self._said = self._said[: found.end()], self._said[found.end() :]
        return said

    def serve(self, *flags: str, behind: str = "") -> str:
        """Start a server; the address of its API."""
        words = " ".join(f"'{word}'" for word in (*SERVER, "--gateway", "fake", *flags))
        self.type(f"{words} {behind}\n")
        address = re.search(r"API +(http\S+)", self.until(r"API +http\S+\r"))
        assert address is not None
        tried = self.until(r"conveyor watch last[^\r]*\r")
        self.to_try = re.findall(r"(?:try|then) +(\S[^\r]*)\r", tried)
        return address[1]

    def is_usual(self) -> bool:
        """True if the shell finds its terminal showing letters, by whole lines."""
        self.type("stty -a; echo en'd'\n")
        shown = self.until(r"end\r")
        return " icanon" in shown and " echo " in shown

    def close(self) -> None:
        """Hang up, which ends all on it."""
        os.close(self._end)
        self.shell.wait(SECONDS)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """A shell on a terminal."""
    opened = Screen(tmp_path)
    yield opened
    opened.close()


def submitted(api: str, *urls: str) -> str:
    body = {"tasks": [{"url": url} for url in urls]}
    answer = httpx.post(f"{api}/jobs", json=body, headers=KEY, timeout=SECONDS)
    assert answer.status_code in (201, 202), answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


def listed(api: str) -> list[Any]:
    found: list[Any] = httpx.get(f"{api}/jobs", headers=KEY, timeout=SECONDS).json()["jobs"]
    return found


def run_of(api: str, job: str) -> Any:
    return httpx.get(f"{api}/jobs/{job}", headers=KEY, timeout=SECONDS).json()["latest_run"]


def opened(screen: Screen) -> str:
    """The addresses that a browser was asked to open, a line each."""
    return screen.seen.read_text() if screen.seen.exists() else ""


def ended(api: str, job: str) -> Any:
    def completed() -> Any:
        run = run_of(api, job)
        return run if run["status"] == "completed" else None

    return eventually(completed, "the end of the run")


def test_keys_do_what_the_help_says(screen: Screen) -> None:
    api = screen.serve("--port", "0", "--requests", "--log-level", "error")
    screen.type("?")
    helped = screen.until(r"q  quit")
    assert re.findall(r"(\S)  \w", helped) == ["o", "s", "p", "f", "c", "?", "q"]

    screen.type("p")
    screen.until("paused: no task starts")
    job = submitted(api, "http://fake.test/a")
    screen.until(r"POST /v1/jobs 201")
    assert run_of(api, job)["stats"]["completed"] == 0
    screen.type("p")
    screen.until("the workers go on")
    assert ended(api, job)["stats"]["successful"] == 1
    screen.until(r"successful \S+ ms, attempt 1, http://fake.test/a")

    screen.type("f")
    screen.until("the next 10 gateway calls fail")
    failing = submitted(api, *(f"http://fake.test/{number}" for number in range(10)))
    run = ended(api, failing)
    assert run["stats"]["successful"] == 10
    screen.until("attempt 2, http://fake.test/")

    screen.type("cy")  # as if pasted: the answer is of after the question
    screen.until(r"y/N")
    assert len(listed(api)) == 2
    screen.type("n")
    screen.until("nothing was cleared")
    assert len(listed(api)) == 2
    screen.type("c")
    screen.until(r"y/N")
    screen.type("y")
    screen.until("all is cleared")
    assert listed(api) == []

    screen.type("o")
    screen.until(re.escape(f"{api.removesuffix('/v1')}/dashboard"))
    eventually(lambda: opened(screen) if "/dashboard" in opened(screen) else None, "a page")
    screen.type("xq")
    screen.until(ENDED)
    assert screen.is_usual()


@pytest.mark.full
def test_an_empty_server_is_seeded_while_it_runs(screen: Screen) -> None:
    api = screen.serve("--port", "0", "--log-level", "error")
    own = submitted(api, "http://fake.test/a")
    ended(api, own)
    screen.type("s")
    screen.until("nothing was seeded: there are jobs already")
    screen.type("cy")
    screen.until(r"y/N")
    screen.type("y")
    screen.until("all is cleared")
    screen.type("ss?")  # the second one changes nothing, and keys are read meanwhile
    screen.until(r"q  quit")
    screen.until("seeded: its runs are those of the key")
    runs = {job["name"]: job["latest_run"] for job in listed(api)}
    assert runs["large"]["stats"]["successful"] == 100_000
    assert runs["paused"]["pause_state"] == "paused"
    assert runs["finished"]["status"] == "completed"
    going = runs["running"]["run_id"]
    [job] = [job["job_id"] for job in listed(api) if job["name"] == "running"]
    before = run_of(api, job)["stats"]["completed"]
    assert run_of(api, job)["run_id"] == going
    page = httpx.get(f"{api}/jobs/{job}/results?limit=1", headers=KEY, timeout=SECONDS).json()
    assert fetched(page["results"][0]["result_url"]).status_code == 200
    assert before >= 30
    screen.type("c")
    screen.until(r"y/N")
    screen.type("y")
    screen.until("all is cleared")
    assert listed(api) == []
    screen.type("q")
    screen.until(ENDED)


def test_a_server_of_real_sites_is_not_seeded(screen: Screen) -> None:
    screen.serve("--port", "0", "--gateway", "direct")
    screen.type("s")
    screen.until("nothing was seeded: a seed needs --gateway fake")
    screen.type("q")
    screen.until(ENDED)


def test_the_terminal_is_as_before_while_the_server_is_stopped(screen: Screen) -> None:
    api = screen.serve("--port", "0")
    screen.type("\x1a")
    screen.until(r"\$ ")
    assert screen.is_usual()
    screen.type("fg\n")
    screen.until(r"fg\r\n")
    screen.type("?")
    screen.until(r"q  quit")
    assert fetched(f"{api.removesuffix('/v1')}/healthz").status_code == 200
    screen.type("\x03")
    screen.until(ENDED)
    assert screen.is_usual()


@pytest.mark.parametrize("end", ["\x1c", "taken"])
def test_the_terminal_is_as_before_after_a_crash(screen: Screen, end: str) -> None:
    if end == "taken":
        with socket.create_server(("127.0.0.1", 0)) as other:
            words = " ".join(f"'{word}'" for word in SERVER)
            screen.type(f"{words} --port {other.getsockname()[1]}\n")
            screen.until(r"is taken[^\n]*\n\$ ")
    else:
        screen.serve("--port", "0")
        screen.type(end)
        screen.until(r"\$ ")
    assert screen.is_usual()


def test_a_server_in_the_background_leaves_the_terminal_to_the_shell(screen: Screen) -> None:
    api = screen.serve("--port", "0", behind="&")
    assert screen.is_usual()
    screen.type("jobs; echo en'd'\n")
    assert "Running" in screen.until(r"end\r")
    assert fetched(f"{api.removesuffix('/v1')}/healthz").status_code == 200
    screen.type("fg\n")
    screen.until(r"fg\r\n")
    _eventually_pressed(screen)
    screen.type("q")
    screen.until(ENDED)
    assert screen.is_usual()


def _eventually_pressed(screen: Screen) -> None:
    """The server notices within a second that it is in the foreground."""
    screen.type("?\n")
    screen.until(r"q  quit")


def test_without_a_terminal_no_key_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"qqq\n")
    command = [*SERVER, "--gateway", "fake", "--port", "0", "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = [server.stdout.readline() for _ in range(2)]
        api = said[0].split()[1]
        assert fetched(f"{api.removesuffix('/v1')}/healthz").status_code == 200
        assert os.read(reading, 10) == b"qqq\n"
        server.send_signal(signal.SIGINT)
        rest = server.stdout.read()
        assert server.wait(SECONDS) == 0
    os.close(reading)
    os.close(writing)
    assert "keys " not in rest
    assert re.search(r"^then +conveyor watch last --server http", rest, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the line to try is for curl")
def test_the_lines_to_try_submit_a_job_and_follow_it(screen: Screen) -> None:
    screen.serve("--port", "0", "--log-level", "error", behind="&")
    submit, follow = screen.to_try
    screen.type(f"{submit}\n")
    screen.until(r'"accepted_tasks":3')
    screen.type(f"{follow.replace('conveyor', shlex.join(CLIENT))}\n")
    screen.until("3 of 3|3 tasks")
    # The end of its terminal does not end what is in the background.
    screen.type("\nfg\n")
    screen.until(r"fg\r\n")
    _eventually_pressed(screen)
    screen.type("q")
    screen.until(ENDED)


def test_open_opens_the_dashboard(screen: Screen) -> None:
    api = screen.serve("--port", "0", "--open")
    eventually(lambda: opened(screen) if opened(screen).endswith("\n") else None, "a page")
    assert screen.seen.read_text() == f"{api.removesuffix('/v1')}/dashboard\n"
    screen.type("q")
    screen.until(r"stopping")
