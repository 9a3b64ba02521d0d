"""Measures what a call of the permit ledger costs the Redis that keeps it, by holders of the job.

Every holder renews in turn, as workers do. The server itself counts the CPU of the calls. Each
round asks all rows of one server, and ratios are taken within a round, to a holder alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import redis as clients

from bench.harness import Figure, Options, Ratio, Row, Scenario, Spread, judged_row, median
from bench.rounds import take_rounds
from bench.servers import redis
from conveyor.clock import SystemClock
from conveyor.ports.permits import LeaseRequest
from conveyor.prod.redis.permits import RedisPermits
from conveyor.prod.redis.server import RedisServer

ALONE = 1
ROWS = {"alone": ALONE, "10 holders": 10, "100 holders": 100, "1000 holders": 1_000}
LEASE = 3_600.0
Turn = Mapping[str, float]


async def _renew(permits: RedisPermits, holders: int, *, calls: int, first: int) -> None:
    """Let holders in turn make so many calls. Raises RuntimeError if one is refused."""
    for call in range(calls):
        request = LeaseRequest(
            job_id=f"job-{holders}",
            holder=f"01KDVDNA00{call % holders:016}",
            count=1,
            before=1,
            sequence=first + call,
            wants=True,
        )
        state = await permits.acquire_or_renew(request, limit=holders, lease=LEASE)
        if not state.granted or state.holders > holders:
            raise RuntimeError(f"a renewal among {holders} holders was not granted: {state}")


def _spent(url: str) -> float:
    """Return the microseconds that the server has spent on scripts."""
    with clients.Redis.from_url(url) as client:
        found: dict[str, dict[str, float]] = client.info("commandstats")
    return sum(found[name]["usec"] for name in found if name.startswith("cmdstat_eval"))


async def _turn(url: str, names: Sequence[str], calls: int) -> Turn:
    clock = SystemClock()
    server = RedisServer(url, clock, connections=1)
    permits = RedisPermits(server, environment="bench")
    costs: dict[str, float] = {}
    for name in names:
        # The first call of each holder announces it, as the ledger is closed.
        await _renew(permits, ROWS[name], calls=ROWS[name], first=0)
        before = _spent(url)
        await _renew(permits, ROWS[name], calls=calls, first=ROWS[name])
        costs[name] = (_spent(url) - before) / calls
    await server.aclose()
    return costs


def _figures(name: str, turns: Sequence[Turn]) -> dict[str, Figure]:
    found: dict[str, Figure] = {"µs of the server/call": round(median([t[name] for t in turns]), 1)}
    if name != "alone" and "alone" in turns[0]:
        costs = Spread.of([turn[name] / turn["alone"] for turn in turns])
        found |= {
            "× alone": Ratio(costs.median),
            "× least": Ratio(costs.least),
            "× most": Ratio(costs.most),
        }
    return found


def run(options: Options) -> list[Row]:
    """Renew permits among so many holders, on a server of the benchmark's own."""
    names = [name for name in ROWS if options.wants(name)]
    if not names:
        return []
    order = list(names)

    def measure() -> Turn:
        order.append(order.pop(0))
        with redis(options.directory("permits")) as server:
            return anyio.run(_turn, server.url, list(order), options.tasks)

    rounds = take_rounds(
        measure,
        wanted=options.repeats,
        label="permits",
        describe=lambda turn: "; ".join(f"{name} {cost:.0f} µs" for name, cost in turn.items()),
    )
    return [judged_row(name, rounds, partial(_figures, name)) for name in names]


SCENARIO = Scenario(name="permits", run=run)
