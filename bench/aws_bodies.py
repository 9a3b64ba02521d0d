"""Measures the CPU that an api takes to serve a body by its link, over both carriers of calls."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import httpx

from bench.aws_fleet import Used, Watched, watched
from bench.harness import Figure, Options, Row, wait_until

BODIES = 50
SIZES = {"8 KB": 8_000, "256 KB": 256_000}
READS = 2_000
"""Bodies read of each size, after as many as there are: each api knows its jobs by then."""
READERS = 8
"""Clients that read at a time."""
CARRIERS = ("http", "boto")
WAIT = 120.0
"""Seconds for a job of BODIES tasks."""


def measure(options: Options) -> list[Row]:
    """Measure each size over each carrier, with the calls that a body takes."""
    found: dict[str, dict[str, Used]] = {size: {} for size in SIZES}
    for carrier in CARRIERS:
        directory = options.directory("aws_bodies")
        settings = {"aws_carrier": carrier}
        with watched(directory, workers=1, settings=settings, by_purpose=False) as fleet:
            for name, size in SIZES.items():
                links = _bodies(fleet, size)
                anyio.run(_read, links, BODIES, size)
                fleet.apis[0].used()
                anyio.run(_read, links, READS, size)
                found[name][carrier] = fleet.apis[0].used()
    return [_row(f"a body of {name} through the api", used) for name, used in found.items()]


def _bodies(fleet: Watched, size: int) -> list[str]:
    """Make bodies of one size; their links."""
    urls = [f"https://site.test/{number}?size={size}" for number in range(BODIES)]
    job_id = fleet.api.call("POST", "/jobs", {"tasks": [{"url": url} for url in urls]})["job_id"]
    wait_until(lambda: fleet.api.run(job_id)["status"] == "completed", seconds=WAIT, pause=0.5)
    page = fleet.api.call("GET", f"/jobs/{job_id}/results?limit={BODIES}")
    return [row["result_url"] for row in page["results"]]


async def _read(links: Sequence[str], count: int, size: int) -> None:
    """Read so many bodies. Raises RuntimeError if one is not whole."""

    async def read(client: httpx.AsyncClient, first: int) -> None:
        for number in range(first, count, READERS):
            answer = await client.get(links[number % len(links)])
            if answer.status_code != 200 or len(answer.content) != size:
                raise RuntimeError(f"a body was not served: {answer.status_code} {answer.text}")

    async with (
        httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
        anyio.create_task_group() as group,
    ):
        for first in range(READERS):
            group.start_soon(read, client, first)


def _row(name: str, used: dict[str, Used]) -> Row:
    figures: dict[str, Figure] = {}
    for carrier, one in used.items():
        figures[f"ms CPU, {carrier}"] = round(1_000 * one.cpu / READS, 2)
        figures[f"calls, {carrier}"] = round(one.calls.total() / READS, 2)
    return Row(name, figures)
