"""HTTP clients that may be behind the gateways: the same GETs through each, plain and over TLS.

Conveyor's client against bare aiohttp, which is not among its dependencies and runs in the peers'
environment. The row of the direct gateway has the whole of it on top of the client: what addresses,
redirects, decoding and verdicts add. Each measurement is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from bench.harness import (
    PEERS_PYTHON,
    ROOT,
    Figure,
    Options,
    Ratio,
    Row,
    Scenario,
    Spread,
    judged_row,
    median,
)
from bench.rounds import take_rounds
from bench.servers import MissingProgram, Site, find_nginx, nginx

BASELINE = "aiohttp"
SHARES = {
    BASELINE: 1.0,
    "conveyor": 1.0,
    "direct gateway": 1.0,
    "httpx": 0.05,
    "pyreqwest": 1.0,
}
"""Clients, and the share of the tasks for each: httpx would take long for all."""
WIRES = ("plain", "TLS")


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement of one client: GETs a second, and microseconds of CPU for each."""

    rate: float
    cpu: float


Turn = Mapping[str, Cost]
"""One measurement of each row."""


def is_there(name: str) -> bool:
    """Return whether a client can be measured: pyreqwest is not a dependency; `pip install` it to
    measure it."""
    return name != "pyreqwest" or find_spec(name) is not None


def program_of(name: str) -> tuple[Path, str]:
    """Return the interpreter and the module that run a client."""
    if name == BASELINE:
        return PEERS_PYTHON, "bench.peers.aiohttp_client"
    return Path(sys.executable), "bench.clients"


def measure(name: str, wire: str, site: Site, tasks: int) -> Cost:
    """Make the GETs of one row once."""
    python, module = program_of(name)
    count = max(1, int(tasks * SHARES[name]))
    url = site.url if wire == "plain" else site.secure_url
    done = subprocess.run(
        [python, "-m", module, name, url, str(count)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SSL_CERT_FILE": str(site.authority)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {wire}: {done.stderr[-2_000:]}")
    seconds, used = map(float, done.stdout.split())
    return Cost(count / seconds, used / count * 1e6)


def figures(client: str, wire: str, quiet: Sequence[Turn]) -> dict[str, Figure]:
    """Return the figures of a row, and its CPU as a multiple of bare aiohttp's in the same
    round."""
    row, baseline = f"{client}, {wire}", f"{BASELINE}, {wire}"
    costs = Spread.of([turn[row].cpu for turn in quiet])
    found: dict[str, Figure] = {
        "requests/s": round(median([turn[row].rate for turn in quiet])),
        "µs CPU": round(costs.median, 1),
        "µs least": round(costs.least, 1),
        "µs most": round(costs.most, 1),
    }
    if baseline in quiet[0]:
        ratios = Spread.of([turn[row].cpu / turn[baseline].cpu for turn in quiet])
        found["× aiohttp"] = Ratio(ratios.median)
        found["× least"] = Ratio(ratios.least)
        found["× most"] = Ratio(ratios.most)
    return found


def run(options: Options) -> list[Row]:
    """Run every client in turn, plain and over TLS, several times over."""
    clients = [name for name in SHARES if options.wants(name) and is_there(name)]
    rows = [(client, wire) for wire in WIRES for client in clients]
    find_nginx()
    if BASELINE in clients and not PEERS_PYTHON.exists():
        raise MissingProgram("bare aiohttp needs .venv-peers, which scripts/bench makes")
    with nginx(options.directory("engine") / "nginx") as site:
        rounds = take_rounds(
            lambda: {
                f"{client}, {wire}": measure(client, wire, site, options.tasks)
                for client, wire in rows
            },
            wanted=options.repeats,
            label="clients",
            describe=lambda turn: "; ".join(
                f"{row} {cost.cpu:.0f} µs" for row, cost in turn.items()
            ),
        )
    return [
        judged_row(f"{client}, {wire}", rounds, partial(figures, client, wire))
        for client, wire in rows
    ]


SCENARIO = Scenario(name="gateway_engine", run=run)
