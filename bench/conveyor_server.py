"""A real conveyor-dev as a child process, and a lean client for its API."""

from __future__ import annotations

import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from bench.against import Code
from bench.harness import wait_until
from bench.processes import Child, memory

API_KEY = "benchmark"
READY_SECONDS = 60.0
IDLE_SECONDS = 1.0
PROGRAM = Path(sys.executable).parent / "conveyor-dev"


class ApiConnection:
    """A kept connection to a server, for one thread."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=120)
        self._last_used = 0.0

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send one request; return status and body of the answer."""
        if time.perf_counter() - self._last_used > IDLE_SECONDS:
            self._connection.close()  # the server may be closing it this very moment
        headers = {"X-API-Key": API_KEY}
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        self._last_used = time.perf_counter()
        return answer.status, content

    def call(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Send one request below /v1; return the decoded answer, None for an empty one. Raises
        RuntimeError unless it is 2xx."""
        status, answer = self.send(method, f"/v1{path}", body)
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """Close it."""
        self._connection.close()


class ConveyorServer(ApiConnection):
    """One server over one data directory, and a connection to it; `ready_seconds` is from its start
    to `readyz` = 200.

    `code` is the version of Conveyor that it runs; None is the installed one.
    """

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        settings: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        code: Code | None = None,
    ) -> None:
        for name in [name for name in os.environ if name.startswith("CONVEYOR_")]:
            del os.environ[name]
        command: list[str | Path] = [
            *([PROGRAM] if code is None else code.command),
            "--port",
            "0",
            "--json",
            "--data-dir",
            data_dir,
            *options,
        ]
        started = time.perf_counter()
        self.data_dir = data_dir
        self.child = Child(
            command,
            log=data_dir.with_suffix(".log"),
            environment={
                **{
                    f"CONVEYOR_{name.upper()}": str(value)
                    for name, value in (settings or {}).items()
                },
                **(environment or {}),
                **({} if code is None else code.environment),
            },
            stdout=subprocess.PIPE,
        )
        self.address = self._read_address()
        super().__init__(self.address)
        wait_until(self._is_ready, seconds=READY_SECONDS, pause=0.002)
        self.ready_seconds = time.perf_counter() - started

    def _read_address(self) -> str:
        """Read host and port from the one line that the server prints."""
        stdout = self.child.process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], READY_SECONDS)
        line = stdout.readline() if readable else b""
        if not line:
            self.child.stop()
            raise RuntimeError(f"conveyor-dev did not start; see {self.child.log}")
        api: str = json.loads(line)["api"]
        return urlsplit(api).netloc

    def _is_ready(self) -> bool:
        return self.send("GET", "/readyz")[0] == 200

    def paused_job(self) -> str:
        """Create an open job without tasks whose run is paused; return its id."""
        job_id: str = self.call(
            "POST", "/jobs", json.dumps({"type": "regular", "status": "open"}).encode()
        )["job_id"]
        self.call("POST", f"/jobs/{job_id}/pause")
        return job_id

    def add(self, job_id: str, batches: Sequence[bytes]) -> float:
        """Add batches made by `add_bodies`; return the seconds it took."""
        started = time.perf_counter()
        for batch in batches:
            self.call("POST", f"/jobs/{job_id}/tasks", batch)
        return time.perf_counter() - started

    def latest_run(self, job_id: str) -> Any:
        """Return the latest run of a job, as the wire has it."""
        return self.call("GET", f"/jobs/{job_id}")["latest_run"]

    def is_completed(self, job_id: str) -> bool:
        """Return whether every task has ended and the run says so."""
        return bool(self.latest_run(job_id)["status"] == "completed")

    def resident_bytes(self) -> int:
        """Return the present resident size."""
        return memory(self.child.pid, "VmRSS")

    def stop(self) -> None:
        """End the server."""
        self.close()
        self.child.stop()
        if self.child.process.stdout is not None:
            self.child.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def tasks_json(urls: Sequence[str], **fields: object) -> bytes:
    """Encode a request body with a task for each URL, beforehand so that it costs no measured
    time."""
    return json.dumps({**fields, "tasks": [{"url": url} for url in urls]}).encode()


def add_bodies(urls: Sequence[str], *, last: bool = True, size: int = 10_000) -> list[bytes]:
    """Encode bodies of add requests for all URLs; the last one closes the job, if `last`."""
    return [
        tasks_json(urls[start : start + size], last_batch=last and start + size >= len(urls))
        for start in range(0, len(urls), size)
    ]
