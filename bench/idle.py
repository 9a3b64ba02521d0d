"""Measures what a server uses whose tasks wait: thousands behind a cap of 5 calls in flight.

Each row is a server of its own, with an in-process fake gateway whose calls take as long as the row
says. All are up at once and each round is one window of the clock for all of them, so that a row
and the server with nothing queued are compared over the same seconds. The kernel counts the CPU of
threads in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from bench.conveyor_server import ConveyorServer, tasks_json
from bench.fake_targets import delayed
from bench.harness import Figure, Options, Ratio, Row, Scenario, Spread, judged_row, median
from bench.processes import counts_threads, thread_seconds, tree, used_between
from bench.rounds import take_rounds
from bench.servers import MissingProgram

CAP = 5
WINDOW_SECONDS = 10.0
SETTLE_SECONDS = 5.0
"""After the last submit, until the first window."""
NOTHING = "nothing queued"
CALLS = {NOTHING: 0.0, "calls of 60 s": 60.0, "calls of 1 s": 1.0, "calls of 0.2 s": 0.2}
"""Seconds of a call, by row."""
ARGUMENTS = ("--gateway", "fake", "--workers", "50", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Idled:
    """One window of one server: the share of a core that it used, and the tasks that ended."""

    share: float
    ended: int


class Waiting:
    """A server with one run whose tasks wait, or with none."""

    def __init__(self, server: ConveyorServer, seconds: float, tasks: int) -> None:
        self._server = server
        self._job_id = ""
        if seconds:
            urls = [delayed(number, seconds) for number in range(tasks)]
            body = tasks_json(urls, type="regular", max_inflight=CAP)
            self._job_id = server.call("POST", "/jobs", body)["job_id"]

    def threads(self) -> dict[int, float]:
        """Return the CPU seconds so far of each of its threads."""
        used: dict[int, float] = {}
        for pid in tree(self._server.child.pid):
            used |= thread_seconds(pid)
        return used

    def ended(self) -> int:
        """Return the number of ended tasks."""
        if not self._job_id:
            return 0
        stats = self._server.latest_run(self._job_id)["stats"]
        if stats["completed"] >= stats["total"]:
            raise RuntimeError("all tasks have ended: give it more (--tasks)")
        completed: int = stats["completed"]
        return completed


Window = Mapping[str, Idled]


def take_window(servers: Mapping[str, Waiting]) -> Window:
    """Leave all servers alone for a while; what each of them used."""
    ended = {name: server.ended() for name, server in servers.items()}
    started = time.perf_counter()
    before = {name: server.threads() for name, server in servers.items()}
    time.sleep(WINDOW_SECONDS)
    used = {name: used_between(before[name], server.threads()) for name, server in servers.items()}
    seconds = time.perf_counter() - started
    return {
        name: Idled(used[name] / seconds, server.ended() - ended[name])
        for name, server in servers.items()
    }


def figures(name: str, tasks: int, windows: Sequence[Window]) -> dict[str, Figure]:
    """Return the figures of a row. Its ratios are to the server with nothing queued, in the same
    window."""
    shares = Spread.of([window[name].share * 100 for window in windows])
    found: dict[str, Figure] = {
        "waiting": tasks if CALLS[name] else 0,
        "% of a core": round(shares.median, 2),
        "least %": round(shares.least, 2),
        "most %": round(shares.most, 2),
        "tasks/s": round(median([window[name].ended for window in windows]) / WINDOW_SECONDS, 1),
    }
    if NOTHING in windows[0]:
        ratios = [window[name].share / window[NOTHING].share for window in windows]
        found |= {
            "× nothing queued": Ratio(median(ratios)),
            "× least": Ratio(min(ratios)),
            "× most": Ratio(max(ratios)),
        }
    return found


def run(options: Options) -> list[Row]:
    """Start all servers, fill their queues, and take windows."""
    if not counts_threads():
        raise MissingProgram("this system does not count the CPU of threads (/proc/PID/schedstat)")
    names = [name for name in CALLS if options.wants(name)]
    if not names:
        return []
    with ExitStack() as stack:
        servers = {}
        for name in names:
            data_dir = options.directory("idle") / "data"
            server = stack.enter_context(ConveyorServer(data_dir, *ARGUMENTS))
            servers[name] = Waiting(server, CALLS[name], options.tasks)
        time.sleep(SETTLE_SECONDS)
        rounds = take_rounds(
            lambda: take_window(servers),
            wanted=options.repeats,
            label="idle",
            describe=lambda window: "; ".join(
                f"{name} {idled.share:.2%}" for name, idled in window.items()
            ),
        )
    return [judged_row(name, rounds, partial(figures, name, options.tasks)) for name in names]


SCENARIO = Scenario(name="idle", run=run)
