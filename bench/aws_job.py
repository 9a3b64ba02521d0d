"""One large job of production, step by step: taken in as a file, written while paused, then worked
as far as wanted."""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.aws_fleet import Role, Used, Watched
from bench.fake_targets import delayed
from bench.harness import wait_until
from bench.ingest import write_csv

SECONDS_A_TASK = 0.02
"""Far more than an emulator takes for one."""
SECONDS_MORE = 300.0
SHARDS = 8
LOOK = 0.5
"""Seconds between two looks."""
STILL = 4
"""Consecutive looks that find no further ended task, beside those for which a call of the gateway
takes: the last calls are over."""
SETTLE = 2.0
"""Seconds to wait for the last acknowledgements and for the return of the last permits."""
LIMITS = {
    "async_threshold": 1_000,
    "task_shard_count": SHARDS,
    "max_input_rows": 2_000_000,
    "max_input_bytes": 500_000_000,
}
"""Settings under which a job of a thousand tasks counts as large, like one of a million."""


class Worked(NamedTuple):
    """The number of ended tasks, and the workers' use for them."""

    tasks: int
    used: Used


class LargeJob:
    """A job of `size` tasks whose rows are written, and whose run is paused. The gateway takes
    `delay` seconds for each."""

    def __init__(self, fleet: Watched, directory: Path, size: int, *, delay: float = 0.0) -> None:
        self._fleet = fleet
        self._still = STILL + math.ceil(delay / LOOK)
        path = directory / f"tasks-{size}.csv"
        write_csv(path, size, delayed(0, delay) if delay else None)
        self.size = size
        used([*fleet.apis, *fleet.workers])
        self.began = time.monotonic()
        body = {
            "type": "regular",
            "file_input_id": self._uploaded(path),
            "async": True,
            "max_inflight": 1_000,
        }
        self.job_id: str = fleet.api.call("POST", "/jobs", body)["job_id"]
        self._pause()
        self.accepted = time.monotonic()
        self.submit = used(fleet.apis)
        """The api's use until then. From here on it is asked for the run only by this job's
        waiting."""
        self._wait(lambda: self._run()["ingest_status"] == "done", tasks=size)
        self.written = time.monotonic()
        self.ingest = used(fleet.workers)
        self.worked_early = self._completed()
        assert self._run()["stats"]["total"] == size

    def work(self, least: int) -> Worked:
        """Release the workers until `least` tasks have ended, or all have."""
        used(self._fleet.workers)
        before = self._completed()
        end = min(before + least, self.size)
        self._fleet.api.call("POST", f"/jobs/{self.job_id}/resume")
        self._wait(lambda: self._completed() >= end, tasks=least)
        if end < self.size:
            self._pause()
            self._wait(self._no_progress(), tasks=least)
        else:
            self._wait(lambda: self._run()["status"] == "completed", tasks=least)
        time.sleep(SETTLE)
        return Worked(self._completed() - before, used(self._fleet.workers))

    def _uploaded(self, path: Path) -> str:
        spec = {"type": "csv", "csv": {"fields": {"url": 0, "external_id": 1}}}
        slot = self._fleet.api.call("POST", "/job_inputs", spec)
        target = urlsplit(slot["upload"]["url"])
        connection = http.client.HTTPConnection(target.netloc, timeout=300)
        headers = {**slot["upload"]["headers"], "Content-Length": str(path.stat().st_size)}
        with path.open("rb") as body:
            connection.request("PUT", f"{target.path}?{target.query}", body, headers)
            answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"PUT: {answer.status} {content[:300]!r}")
        file_input_id: str = slot["file_input_id"]
        return file_input_id

    def _pause(self) -> None:
        self._fleet.api.call("POST", f"/jobs/{self.job_id}/pause")

    def _run(self) -> Any:
        return self._fleet.api.run(self.job_id)

    def _completed(self) -> int:
        completed: int = self._run()["stats"]["completed"]
        return completed

    def _no_progress(self) -> Callable[[], bool]:
        """Make a function that returns, over repeated calls, whether no further task ends."""
        seen: list[int] = []

        def still() -> bool:
            seen.append(self._completed())
            return len(seen) >= self._still and len(set(seen[-self._still :])) == 1

        return still

    def _wait(self, done: Callable[[], bool], *, tasks: int) -> None:
        wait_until(done, seconds=SECONDS_MORE + SECONDS_A_TASK * tasks, pause=LOOK)


def used(roles: Sequence[Role]) -> Used:
    """Return the use of roles since the last call."""
    return sum((role.used() for role in roles), Used())
