"""Rows read for each row returned, by the server's own metrics, whole list by pages of 1,000."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.acceptance.support_boot import boot
from tests.acceptance.support_wire import Wire, eventually, target
from tests.patient import fetched

pytestmark = pytest.mark.server

TASKS = 4_000


@pytest.mark.parametrize(
    ("count", "scheme", "most"),
    [
        (1, "stripe", 1.0),
        (8, "stripe", 1.0),
        (16, "stripe", 1.0),
        (8, "fnv32a", 1.12),
        (16, "fnv32a", 1.18),
    ],
)
def test_rows_read_for_each_row_returned(
    tmp_path: Path, count: int, scheme: str, most: float
) -> None:
    settings = {"task_shard_count": count, "shard_scheme": scheme, "async_threshold": 1_000}
    with boot(tmp_path, "--gateway", "fake", **settings) as server, Wire(server.api) as wire:
        urls = [target(f"page/{number}", delay=60) for number in range(TASKS)]
        job_id = wire.submit(urls)["job_id"]
        eventually(
            lambda: wire.latest_run(job_id)["ingest_status"] == "done" or None, "rows are written"
        )
        wire.ask("POST", f"/jobs/{job_id}/stop")
        read, returned = totals(server.origin)
        rows = wire.rows(job_id, limit=1_000)
        assert [row["url"] for row in rows] == urls
        read_after, returned_after = totals(server.origin)
        assert returned_after - returned == TASKS
        # The rows of the job and its run are counted as well, with each page.
        records = 2 * (TASKS // 1_000 + 1)
        assert TASKS <= read_after - read <= most * TASKS + records


def totals(origin: str) -> tuple[float, float]:
    """Rows read and rows returned so far."""
    metrics = fetched(f"{origin}/metrics").text
    found = [
        re.search(rf"^conveyor_store_rows_{word}_total (\S+)$", metrics, re.MULTILINE)
        for word in ("read", "returned")
    ]
    assert found[0] is not None
    assert found[1] is not None
    return float(found[0][1]), float(found[1][1])
