"""Measures where resident memory settles under a steady mix of all that callers do.

Some threads submit jobs, poll them, read their results, run them again in part, export them,
download the exports, list jobs and delete old ones, for as long as `--minutes` says. At most so
many jobs are there at a time, so that nothing but a leak or the allocator can let memory grow. Two
servers live through the same minutes: one as it is, and one whose allocator may use two arenas
(MALLOC_ARENA_MAX of glibc), which shows what of the memory is the allocator's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.conveyor_server import ApiConnection, ConveyorServer, tasks_json
from bench.fake_targets import missing, small
from bench.harness import Figure, Options, Ratio, Row, Scenario, median, wait_until
from bench.processes import memory

CALLERS = 4
TURN_SECONDS = 1.0
"""A caller begins a turn that often, or as soon as the last one is done."""
KEPT = 5
"""Jobs of each caller that are there at a time."""
ONE_FAILS_IN = 10
SAMPLE_SECONDS = 1.0
MOST_SECONDS = 120.0
PARTS = 4
"""Parts of the time whose memory is compared."""
SETTLED = 1.03
"""The last part's memory at most, as a multiple of the part before it, where it has settled."""
ARGUMENTS = ("--gateway", "fake", "--workers", "50", "--log-level", "warning")
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "two arenas": {"MALLOC_ARENA_MAX": "2"},
}


@dataclass(slots=True)
class Caller:
    """One caller, with a connection and some jobs of its own."""

    api: ApiConnection
    tasks: int
    jobs: deque[str] = field(default_factory=deque)
    turns: int = 0
    requests: int = 0

    def turn(self) -> None:
        """Do once all that callers do. Raises RuntimeError if anything is wrong or missing."""
        failing = self.tasks // ONE_FAILS_IN
        urls = [missing(number) for number in range(failing)]
        urls += [small(number) for number in range(self.tasks - failing)]
        job_id = self._call("POST", "/jobs", tasks_json(urls, type="regular"))["job_id"]
        self.jobs.append(job_id)
        run = self._ended(job_id)
        self._check("tasks that succeeded", run["stats"]["successful"], self.tasks - failing)
        self._check("rows", self._count_rows(job_id), self.tasks)
        self._export(f"/jobs/{job_id}/runs/{run['run_id']}/exports")
        if failing:
            self._call("POST", f"/jobs/{job_id}/rerun?status=failed")
            run = self._ended(job_id)
            self._check("tasks that failed again", run["stats"]["failed"], failing)
        self._call("GET", "/jobs?limit=100")
        if len(self.jobs) > KEPT:
            self._call("DELETE", f"/jobs/{self.jobs.popleft()}")
        self.turns += 1

    def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        self.requests += 1
        return self.api.call(method, path, body)

    def _ended(self, job_id: str) -> Any:
        """Poll the job until its run has ended; return the run."""
        runs: list[Any] = []

        def is_over() -> bool:
            runs.append(self._call("GET", f"/jobs/{job_id}")["latest_run"])
            return bool(runs[-1]["status"] == "completed")

        wait_until(is_over, seconds=MOST_SECONDS, pause=0.1)
        return runs[-1]

    def _count_rows(self, job_id: str) -> int:
        rows, cursor = 0, ""
        while True:
            page = self._call("GET", f"/jobs/{job_id}/results?limit=100{cursor}")
            rows += len(page["results"])
            if not page.get("next_cursor"):
                return rows
            cursor = f"&cursor={page['next_cursor']}"

    def _export(self, path: str) -> None:
        """Export a run, and download all of it."""
        export_id = self._call("POST", path)["export_id"]
        found: list[Any] = []

        def is_ready() -> bool:
            found.append(self._call("GET", f"{path}/{export_id}"))
            return "download_url" in found[-1]

        wait_until(is_ready, seconds=MOST_SECONDS, pause=0.1)
        link = urlsplit(found[-1]["download_url"])
        self.requests += 1
        status, archive = self.api.send("GET", f"{link.path}?{link.query}")
        self._check("the download of an export", (status, archive[:2]), (200, b"PK"))

    @staticmethod
    def _check(what: str, given: object, right: object) -> None:
        if given != right:
            raise RuntimeError(f"{what}: {given!r}, not {right!r}")


@dataclass(frozen=True, slots=True)
class Sample:
    """The resident bytes of a server, all and those that no file backs."""

    resident: int
    anonymous: int


class Soaked:
    """A server, its callers, and its memory so far."""

    def __init__(self, server: ConveyorServer, tasks: int) -> None:
        self._server = server
        self.callers = [Caller(ApiConnection(server.address), tasks) for _ in range(CALLERS)]
        self.samples: list[Sample] = []
        self.take_sample()
        self._at_start = self.samples.pop()

    def take_sample(self) -> None:
        """Read its memory now."""
        pid = self._server.child.pid
        self.samples.append(Sample(memory(pid, "VmRSS"), memory(pid, "RssAnon")))

    def figures(self) -> dict[str, Figure]:
        """Return the work done, and what became of its memory."""
        return {
            "turns": sum(caller.turns for caller in self.callers),
            "requests": sum(caller.requests for caller in self.callers),
            **memory_figures(self._at_start, self.samples),
        }


def memory_figures(at_start: Sample, samples: Sequence[Sample]) -> dict[str, Figure]:
    """Return the memory at the start, in each part of the time (the middle of its samples), and
    whether it has settled."""
    resident = [sample.resident / 2**20 for sample in samples]
    size = -(-len(resident) // PARTS)
    parts = [median(resident[at : at + size]) for at in range(0, len(resident), size)]
    growth = parts[-1] / parts[-2]
    return {
        "RSS MB at start": round(at_start.resident / 2**20, 1),
        **{f"part {number}": round(part, 1) for number, part in enumerate(parts, 1)},
        "peak": round(max(resident), 1),
        "anonymous": round(samples[-1].anonymous / 2**20, 1),
        "last × before": Ratio(growth),
        "verdict": "settled" if growth <= SETTLED else "grows",
    }


def soak(servers: Sequence[Soaked], seconds: float) -> None:
    """Let all callers of all servers work, and read the memory every second.

    Raises the first error of a caller, once all of them have stopped.
    """
    stop = threading.Event()

    def work(caller: Caller) -> None:
        while not stop.is_set():
            started = time.perf_counter()
            caller.turn()
            stop.wait(started + TURN_SECONDS - time.perf_counter())

    callers = [caller for server in servers for caller in server.callers]
    with ThreadPoolExecutor(len(callers)) as threads:
        works = [threads.submit(work, caller) for caller in callers]
        ends = time.perf_counter() + seconds
        try:
            while not any(each.done() for each in works) and (
                time.perf_counter() < ends or len(servers[0].samples) < PARTS
            ):
                time.sleep(SAMPLE_SECONDS)
                for server in servers:
                    server.take_sample()
        finally:
            stop.set()
    for each in works:
        each.result()


def run(options: Options) -> list[Row]:
    """Soak all servers over the same minutes."""
    names = [name for name in ENVIRONMENTS if options.wants(name)]
    if not names:
        return []
    with ExitStack() as stack:
        servers = {}
        for name in names:
            data_dir = options.directory("soak") / "data"
            server = ConveyorServer(data_dir, *ARGUMENTS, environment=ENVIRONMENTS[name])
            servers[name] = Soaked(stack.enter_context(server), options.tasks)
        soak(list(servers.values()), options.minutes * 60)
    return [Row(name, server.figures()) for name, server in servers.items()]


SCENARIO = Scenario(name="soak", run=run)
