"""The programs as a person runs them: processes, and what they said."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from conveyor.testing.local_server import ConveyorServer
from tests.acceptance.support_commands import forks
from tests.patient import fetched

CLIENT = [sys.executable, "-m", "conveyor"]
SERVER = [sys.executable, "-c", "from conveyor.cli import dev_main; dev_main()"]
QUIET_PYTEST = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
"""Runs tests of users with warnings as errors, and leaves nothing in their directory."""
JOB_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")

PROGRESS = re.compile(r"(fetching|writing|downloading|making the export|sending .*|checking .*): ")


class Ran:
    """The exit code and output of a command, but for the progress of what takes longer than 3 s."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout.splitlines()
        self.err = [line for line in done.stderr.splitlines() if not PROGRESS.match(line)]

    @property
    def job_id(self) -> str:
        found = JOB_ID.search(self.out[0])
        assert found, (self.out, self.err)
        return found[0]


def environment(server: ConveyorServer, **more: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "CONVEYOR_URL": server.base_url,
        "ZENROWS_API_KEY": server.api_key,
        **more,
    }


def conveyor(server: ConveyorServer, *arguments: str, given: str = "") -> Ran:
    return Ran(forks().run(arguments, environment(server), given, seconds=60))


def in_shell(server: ConveyorServer, redirection: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a command with a stream redirected; its exit code and what standard error got."""
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *CLIENT, *arguments],
        env=environment(server),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stderr.splitlines()


def dev(data_dir: Path, *flags: str) -> Ran:
    return Ran(
        subprocess.run(
            [*SERVER, "--data-dir", str(data_dir), *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    )


def free_port() -> int:
    """A port that nobody listens on, from below those that the system gives away by itself: no
    connection, and no server on a port of the system's choice, takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if fetched(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"nothing at {url}"
        time.sleep(0.02)


def lines_until(stream: Any, start: str) -> list[str]:
    lines: list[str] = []
    while not (lines and lines[-1].startswith(start)):
        line = stream.readline()
        assert line, lines
        lines.append(line.rstrip("\n"))
    return lines


def said(lines: list[str], label: str) -> str:
    (line,) = [line for line in lines if line.startswith(label)]
    return line.removeprefix(label).strip()
