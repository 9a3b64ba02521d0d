"""Measures the whole job against the peers: fetch, store the body, make the state durable.

Each contender boots, works WARM_UP tasks, stands still while the tasks are enqueued (Conveyor by a
paused run, a peer by SIGSTOP), and is then released. So enqueueing and draining are measured apart,
for all alike, and start-up is left out. Polling the durable state finds the end. All of it happens
on tmpfs and on the file system of the working tree, where in each round a bare loop also writes the
same bodies and nothing else: the share of the file system.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Protocol

from bench.against import Code, Halves
from bench.conveyor_server import API_KEY, ConveyorServer, add_bodies
from bench.harness import (
    PEERS_PYTHON,
    ROOT,
    Figure,
    Options,
    Ratio,
    Row,
    Scenario,
    Spread,
    count_bodies,
    file_system,
    judged_row,
    median,
    wait_until,
)
from bench.processes import Child, Usage, usage
from bench.rounds import Half, take_rounds
from bench.servers import (
    PAGE_BYTES,
    MissingProgram,
    Site,
    find_nginx,
    find_redis,
    nginx,
    redis,
    version_of,
)

WARM_UP = 200
CONCURRENCY = 50
PROCESSES = 2
DIRECT = (
    *("--gateway", "direct", "--allow-private", "--workers", str(CONCURRENCY)),
    *("--log-level", "warning"),
)
"""Arguments of conveyor-dev."""
DRAIN_SECONDS = 300.0
SHARED_MEMORY = Path("/dev/shm")
PLACES = ("tmpfs", "tree")
OURS = ("conveyor", "watched")
"""The contenders that are no peers: this server, and the same with a reader of its stream."""


class Contender(Protocol):
    """One program that does the job."""

    processes: int

    def start(self) -> None:
        """Boot, and work the first WARM_UP tasks."""
        ...

    def enqueue(self, tasks: int) -> float:
        """Enqueue while the workers stand still; return the seconds it took."""
        ...

    def release(self) -> None:
        """Release the workers."""
        ...

    def is_done(self) -> bool:
        """Return whether every enqueued task has a durable state."""
        ...

    def usage(self) -> Usage:
        """Return the use of its own processes so far."""
        ...

    def broker_cpu(self) -> float:
        """Return the CPU seconds of its queue's server so far; 0 if it needs no server."""
        ...


class Conveyor:
    """conveyor-dev in one process."""

    processes = 1

    def __init__(
        self, directory: Path, site: Site, stack: ExitStack, code: Code | None = None
    ) -> None:
        self._directory, self._site, self._stack = directory, site, stack
        self._code = code
        self._job = ""

    def start(self) -> None:
        self._server = self._stack.enter_context(
            ConveyorServer(self._directory / "data", *DIRECT, code=self._code)
        )
        self._next = 0
        self.enqueue(WARM_UP)
        self.release()
        wait_until(self.is_done, seconds=DRAIN_SECONDS)

    def enqueue(self, tasks: int) -> float:
        self._job = self._server.paused_job()
        bodies = add_bodies(
            [f"{self._site.url}/{number}" for number in range(self._next, self._next + tasks)]
        )
        self._next += tasks
        return self._server.add(self._job, bodies)

    def release(self) -> None:
        self._server.call("POST", f"/jobs/{self._job}/resume")

    def is_done(self) -> bool:
        return self._server.is_completed(self._job)

    def usage(self) -> Usage:
        return self._server.child.usage()

    def broker_cpu(self) -> float:
        return 0.0


class Watched(Conveyor):
    """conveyor-dev while somebody reads the stream of the run."""

    def release(self) -> None:
        run = self._server.latest_run(self._job)
        reader = threading.Thread(target=self._read, args=(run["run_id"],), daemon=True)
        reader.start()
        self._stack.callback(reader.join)
        super().release()

    def _read(self, run_id: str) -> None:
        """Read the stream to its end. Raises RuntimeError for one without an end."""
        connection = HTTPConnection(self._server.address, timeout=DRAIN_SECONDS)
        with closing(connection):
            path = f"/v1/jobs/{self._job}/runs/{run_id}/events"
            connection.request("GET", path, headers={"X-API-Key": API_KEY})
            if b"event: end" not in connection.getresponse().read():
                raise RuntimeError("the stream of the run broke off")


class Peer:
    """A task queue on redis: `module` of bench.peers, `command` after the environment's bin/."""

    processes = PROCESSES

    def __init__(
        self, module: str, command: Sequence[str], directory: Path, site: Site, stack: ExitStack
    ) -> None:
        self._module, self._command = module, command
        self._directory, self._site, self._stack = directory, site, stack
        self._enqueued = 0

    def start(self) -> None:
        self._redis = self._stack.enter_context(redis(self._directory))
        self._environment = {
            "BENCH_REDIS_URL": self._redis.url,
            "BENCH_DIRECTORY": str(self._directory),
            "BENCH_THREADS": str(CONCURRENCY // PROCESSES),
            "PYTHONPATH": str(ROOT),
        }
        program, *arguments = self._command
        self._workers = Child(
            [PEERS_PYTHON.parent / program, *arguments],
            log=self._directory / "workers.log",
            environment=self._environment,
        )
        self._stack.callback(self._workers.stop)
        self._send(WARM_UP)
        wait_until(self.is_done, seconds=DRAIN_SECONDS)

    def _send(self, tasks: int) -> float:
        arguments = [str(self._enqueued), str(tasks), self._site.url]
        answer = subprocess.run(
            [PEERS_PYTHON, "-m", self._module, *arguments],
            env=self._environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        self._enqueued += tasks
        return float(answer.stdout)

    def enqueue(self, tasks: int) -> float:
        self._workers.freeze()
        return self._send(tasks)

    def release(self) -> None:
        self._workers.thaw()

    def is_done(self) -> bool:
        if self._workers.process.poll() is not None:
            raise RuntimeError(f"the workers ended; see {self._workers.log}")
        return sum(map(_states, self._directory.glob("states-*.sqlite"))) >= self._enqueued

    def usage(self) -> Usage:
        return self._workers.usage()

    def broker_cpu(self) -> float:
        return usage(self._redis.child.pid).cpu_seconds


def _states(path: Path) -> int:
    """Count the states in a peer's file (rows are only ever added)."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return int(database.execute("SELECT ifnull(max(rowid), 0) FROM states").fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # made this very moment, and still without its table
    finally:
        database.close()


def taskiq(directory: Path, site: Site, stack: ExitStack) -> Peer:
    """Start taskiq on a redis stream."""
    each = str(CONCURRENCY // PROCESSES)
    command = ["taskiq", "worker", "bench.peers.taskiq_peer:broker", "--log-level", "WARNING"]
    command += ["--workers", str(PROCESSES), "--max-async-tasks", each, "--max-prefetch", each]
    command += ["--no-parse"]
    return Peer("bench.peers.taskiq_peer", command, directory, site, stack)


def dramatiq(directory: Path, site: Site, stack: ExitStack) -> Peer:
    """Start dramatiq on redis."""
    each = str(CONCURRENCY // PROCESSES)
    command = ["dramatiq", "bench.peers.dramatiq_peer", "--path", str(ROOT)]
    command += ["--processes", str(PROCESSES), "--threads", each]
    return Peer("bench.peers.dramatiq_peer", command, directory, site, stack)


CONTENDERS: dict[str, Callable[[Path, Site, ExitStack], Contender]] = {
    "conveyor": Conveyor,
    "watched": Watched,
    "taskiq": taskiq,
    "dramatiq": dramatiq,
}


@dataclass(frozen=True, slots=True)
class Drain:
    """One measurement of one contender; seconds, and peak resident bytes."""

    enqueue: float
    drain: float
    cpu: float
    broker_cpu: float
    peak_rss: int
    processes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One round: every contender once, and the seconds of wall and of CPU that a bare loop took to
    write as many bodies."""

    runs: Mapping[str, Drain]
    files: float
    files_cpu: float


def measure(name: str, options: Options, code: Code | None = None) -> Drain:
    """Run one contender once, in a fresh directory, and verify its results.

    `code` is the version of Conveyor to run, if it is the contender.
    """
    directory = options.directory(f"drain-{name}")
    with ExitStack() as stack:
        site = stack.enter_context(nginx(directory / "nginx"))
        if code is None:
            contender = CONTENDERS[name](directory, site, stack)
        else:
            contender = Conveyor(directory, site, stack, code)
        contender.start()
        enqueued = contender.enqueue(options.tasks)
        before, broker_before = contender.usage(), contender.broker_cpu()
        requests = site.requests()
        started = time.perf_counter()
        contender.release()
        ended = wait_until(contender.is_done, seconds=DRAIN_SECONDS)
        after, broker_after = contender.usage(), contender.broker_cpu()
        served = site.requests() - requests
        if served != options.tasks:
            raise RuntimeError(f"{name}: {served} requests for {options.tasks} tasks")
    bodies = count_bodies(directory, PAGE_BYTES) - 1  # nginx's own page lies there too
    if bodies != options.tasks + WARM_UP:
        raise RuntimeError(f"{name}: {bodies} bodies for {options.tasks} + {WARM_UP} tasks")
    if options.discards:
        shutil.rmtree(directory)
    return Drain(
        enqueued,
        ended - started,
        after.cpu_seconds - before.cpu_seconds,
        broker_after - broker_before,
        after.peak_rss,
        contender.processes,
    )


def write_bodies(directory: Path, count: int) -> tuple[float, float]:
    """Write as many bodies as a contender, each in place; return seconds of wall and of CPU."""
    folder = directory / "bodies"
    folder.mkdir()
    body = bytes(PAGE_BYTES)
    before, started = _cpu(), time.perf_counter()
    for number in range(count):
        with open(folder / str(number), "wb", buffering=0) as file:
            file.write(body)
    return time.perf_counter() - started, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_turn(names: Sequence[str], options: Options) -> Turn:
    """Measure every contender once, and the files alone."""
    runs = {name: measure(name, options) for name in names}
    directory = options.directory("drain-files")
    seconds, cpu = write_bodies(directory, options.tasks)
    if options.discards:
        shutil.rmtree(directory)
    return Turn(runs, seconds, cpu)


def best_peer(turns: Sequence[Turn]) -> str | None:
    """Return the peer that drains the most tasks a second at the median; None without peers."""
    peers = [name for name in turns[0].runs if name not in OURS]
    return min(
        peers, key=lambda name: median([turn.runs[name].drain for turn in turns]), default=None
    )


def figures(name: str, tasks: int, turns: Sequence[Turn]) -> dict[str, Figure]:
    """Return the figures of a contender. Its ratios are to the best peer in the same round."""
    runs = [turn.runs[name] for turn in turns]
    rates = Spread.of([tasks / run.drain for run in runs])
    found: dict[str, Figure] = {
        "processes": runs[0].processes,
        "enqueue/s": round(median([tasks / run.enqueue for run in runs])),
        "drain/s": round(rates.median),
        "least/s": round(rates.least),
        "most/s": round(rates.most),
        "µs CPU/task": round(median([run.cpu / tasks * 1e6 for run in runs])),
        "of that files": f"{median([turn.files_cpu / turn.runs[name].cpu for turn in turns]):.0%}",
        "µs queue/task": round(median([run.broker_cpu / tasks * 1e6 for run in runs])),
        "peak RSS MB": round(median([run.peak_rss / 2**20 for run in runs])),
    }
    if name == "watched" and "conveyor" in turns[0].runs:
        found["× unwatched"] = Ratio(
            median([turn.runs["conveyor"].drain / turn.runs[name].drain for turn in turns])
        )
    if (best := best_peer(turns)) is not None:
        speeds = Spread.of([turn.runs[best].drain / turn.runs[name].drain for turn in turns])
        costs = Spread.of([turn.runs[name].cpu / turn.runs[best].cpu for turn in turns])
        found |= {
            "× best peer": Ratio(speeds.median),
            "× least": Ratio(speeds.least),
            "× most": Ratio(speeds.most),
            "CPU × its": Ratio(costs.median),
            "CPU × least": Ratio(costs.least),
            "CPU × most": Ratio(costs.most),
        }
    return found


def files_figures(tasks: int, turns: Sequence[Turn]) -> dict[str, Figure]:
    """Return the figures of the bare loop that writes the bodies."""
    rates = Spread.of([tasks / turn.files for turn in turns])
    return {
        "drain/s": round(rates.median),
        "least/s": round(rates.least),
        "most/s": round(rates.most),
        "µs CPU/task": round(median([turn.files_cpu / tasks * 1e6 for turn in turns])),
    }


@contextmanager
def places(options: Options) -> Iterator[list[tuple[str, Options]]]:
    """Give the places to measure in, by the names of their file systems: a tmpfs and --work."""
    tree = (file_system(options.work), options)
    wanted = [place for place in PLACES if options.wants_place(place)]
    found = [tree] if "tree" in wanted else []
    if "tmpfs" not in wanted or (tree[0] == "tmpfs" and found):
        yield found
        return
    if not _has_room(SHARED_MEMORY):
        print(f"drain: there is no tmpfs with 1 GB to spare at {SHARED_MEMORY}", file=sys.stderr)
        yield found or [tree]
        return
    # Memory is freed again; the rule that nothing is deleted is for file systems on disks.
    with tempfile.TemporaryDirectory(prefix="conveyor-bench-", dir=SHARED_MEMORY) as directory:
        memory = replace(options, work=Path(directory), discards=True)
        yield [("tmpfs", memory), *found]


def _has_room(path: Path) -> bool:
    return (
        path.is_dir()
        and os.access(path, os.W_OK)
        and file_system(path) == "tmpfs"
        and shutil.disk_usage(path).free > 2**30
    )


def run(options: Options) -> list[Row]:
    """Run every contender in turn, in several rounds, on each file system."""
    names = [name for name in CONTENDERS if options.wants(name)]
    programs = [find_nginx()]
    if any(name not in OURS for name in names):
        programs.append(find_redis())
        if not PEERS_PYTHON.exists():
            raise MissingProgram("the peers need .venv-peers, which scripts/bench makes")
    print(f"drain: {', '.join(map(version_of, programs))}", file=sys.stderr)
    if not names:
        return []
    with places(options) as found:
        return [row for kind, place in found for row in rows_of(kind, names, place)]


def rows_of(kind: str, names: Sequence[str], options: Options) -> list[Row]:
    """Measure on one file system."""
    tasks = options.tasks
    rounds = take_rounds(
        partial(take_turn, names, options),
        wanted=options.repeats,
        label=f"drain on {kind}",
        describe=lambda turn: "; ".join(
            f"{name} {tasks / run.drain:,.0f} tasks/s, {run.cpu / tasks * 1e6:.0f} µs"
            for name, run in turn.runs.items()
        ),
    )
    rows = [judged_row(f"{name}, {kind}", rounds, partial(figures, name, tasks)) for name in names]
    return [*rows, judged_row(f"files alone, {kind}", rounds, partial(files_figures, tasks))]


def against(code: Code, options: Options) -> Halves:
    """Prepare one version of Conveyor: the whole job, without peers."""

    def half() -> Half:
        drained = measure("conveyor", options, code)
        return Half(options.tasks, drained.cpu, drained.drain)

    return {"conveyor": half}


SCENARIO = Scenario(name="drain", run=run, against=against)
