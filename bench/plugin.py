"""Measures what the setup and teardown of the pytest plugin cost a test: a server of its own, as
`conveyor_server` gives it, against the shared one, which is emptied after each, as
`conveyor_shared` does.

Between setup and teardown each test has one job of ten tasks worked, which is not counted: what is
to go away is there. Both take turns within a round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from http.client import HTTPConnection
from urllib.parse import urlsplit

import msgspec

from bench.harness import Figure, Options, Ratio, Row, Scenario, Spread, judged_row, median
from bench.rounds import take_rounds
from conveyor.testing import server
from conveyor.testing.local_server import ConveyorServer

OWN, SHARED = "a server a test", "shared and emptied"
ROWS = (OWN, SHARED)
TASKS = 10
Turn = Mapping[str, float]


def use(booted: ConveyorServer) -> None:
    """Have a job worked, as a test does. Raises RuntimeError where it is refused."""
    tasks = [{"url": booted.url(f"page/{number}")} for number in range(TASKS)]
    connection = HTTPConnection(urlsplit(booted.origin).netloc)
    headers = {"X-API-Key": booted.api_key, "Content-Type": "application/json"}
    connection.request("POST", "/v1/jobs", msgspec.json.encode({"tasks": tasks}), headers)
    status = connection.getresponse().status
    connection.close()
    if status != 201:
        raise RuntimeError(f"the job was answered {status}")
    booted.drain()


def own(options: Options) -> float:
    """Give each test a server of its own; return the seconds of setup and teardown of one."""
    spent = 0.0
    for _ in range(options.tasks):
        began = time.perf_counter()
        with server(options.directory("plugin")) as booted:
            spent += time.perf_counter() - began
            use(booted)
            began = time.perf_counter()
        spent += time.perf_counter() - began
    return spent / options.tasks


def shared(options: Options) -> float:
    """Empty one server after each test; return the seconds that this takes. Its start and end are
    those of a whole run of tests, and are left out."""
    spent = 0.0
    with server(options.directory("plugin")) as booted:
        for _ in range(options.tasks):
            use(booted)
            began = time.perf_counter()
            booted.reset()
            spent += time.perf_counter() - began
    return spent / options.tasks


def figures(name: str, turns: Sequence[Turn]) -> dict[str, Figure]:
    """Return the figures of a row."""
    found: dict[str, Figure] = {
        "ms a test": round(median([turn[name] for turn in turns]) * 1e3, 1),
    }
    if name != OWN and OWN in turns[0]:
        ratios = Spread.of([turn[name] / turn[OWN] for turn in turns])
        found |= {
            "× a server a test": Ratio(ratios.median),
            "× least": Ratio(ratios.least),
            "× most": Ratio(ratios.most),
        }
    return found


def run(options: Options) -> list[Row]:
    """Set up and tear down as many tests as there are `tasks`, both ways, in turn."""
    ways = {OWN: own, SHARED: shared}
    names = [name for name in ROWS if options.wants(name)]
    if not names:
        return []
    rounds = take_rounds(
        lambda: {name: ways[name](options) for name in names},
        wanted=options.repeats,
        label="plugin",
        describe=lambda taken: "; ".join(
            f"{name} {seconds * 1e3:.1f} ms a test" for name, seconds in taken.items()
        ),
    )
    return [judged_row(name, rounds, partial(figures, name)) for name in names]


SCENARIO = Scenario(name="plugin", run=run)
