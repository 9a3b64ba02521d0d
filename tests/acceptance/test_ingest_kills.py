"""kill -9 in the middle of an ingestion, again and again: every row once, no row reset."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from conveyor.testing.gateway_server import GatewayServer
from tests.acceptance.support_data import rows_left, rows_of, server, temporary_files
from tests.acceptance.support_wire import Wire, eventually, target
from tests.disk import body_files, files_below

pytestmark = pytest.mark.server

IN_FLIGHT = 10
SETTINGS: dict[str, object] = {
    "max_interruptions": 1_000,
    "shutdown_grace": 0,
    "async_threshold": 1_000,
    "max_inline_tasks": 1_000_000,
}
_ROWS = "SELECT count(*), count(DISTINCT task_id), sum(state > 0) FROM tasks"
_CLAIMS = "SELECT task_key, claim_number FROM claims"


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(
    ("tasks", "kills", "seed"),
    [
        (5_000, 4, 1),
        pytest.param(
            50_000, 50, 2, marks=(pytest.mark.full, pytest.mark.timeout(1_800)), id="full"
        ),
    ],
)
def test_an_ingestion_survives_kills_at_random_moments(
    tmp_path: Path, gateway: GatewayServer, tasks: int, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    urls = [target(f"kill/{number}") for number in range(tasks)]
    claims: set[tuple[int, int]] = set()
    ended = written = 0
    job_id = ""
    for _ in range(kills):
        with (
            server(tmp_path, "--gateway", gateway.url, **SETTINGS) as process,
            Wire(process.info.api) as wire,
        ):
            if not job_id:
                job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            run = wire.latest_run(job_id)
            assert run["stats"]["total"] == tasks
            assert run["status"] == "running"
            time.sleep(draw.random() * 0.15)  # the moment is what the test varies
        claims.update(rows_left(tmp_path, _CLAIMS))
        [(rows, ids, over)] = rows_left(tmp_path, _ROWS)
        assert rows == ids
        assert rows >= written
        assert (over or 0) >= ended
        written, ended = rows, over or 0

    with (
        server(tmp_path, "--gateway", gateway.url, **SETTINGS) as process,
        Wire(process.info.api) as wire,
    ):
        run = wire.ended(job_id, timeout=600)
        assert run["status"] == "completed"
        assert run["ingest_status"] == "done"
        assert run["stats"]["successful"] == run["stats"]["total"] == tasks
        assert rows_of(tmp_path, _ROWS) == [(tasks, tasks, tasks)]
        assert [row["url"] for row in wire.rows(job_id)] == urls
        assert rows_of(tmp_path, "SELECT max(attempts) FROM tasks") == [(1,)]
        assert temporary_files(tmp_path) == []
        # A kill in the middle of its removal may leave an empty directory, which is nothing.
        staged = tmp_path / "blobs" / "staged"
        eventually(lambda: not list(files_below(staged)) or None, "nothing is staged any more")
    assert set(gateway.hits.counts) == set(urls)
    assert tasks <= gateway.hits.total <= tasks + len(claims)


def test_a_list_that_was_staged_for_no_run_is_removed(tmp_path: Path) -> None:
    directory = _killed_while_staging(tmp_path)
    assert rows_left(directory, "SELECT run_id FROM runs") == []
    assert body_files(directory)
    with server(directory, **SETTINGS):
        eventually(lambda: not body_files(directory) or None, "nothing staged is left")


def _killed_while_staging(tmp_path: Path) -> Path:
    """Kill a server while it stages a list, before it answers; return its directory."""
    urls = [target(f"staged/{number}") for number in range(60_000)]
    for number in range(20):
        directory = tmp_path / str(number)
        with (
            server(directory, **SETTINGS) as process,
            Wire(process.info.api) as wire,
            ThreadPoolExecutor(max_workers=1) as pool,
        ):
            sent = pool.submit(wire.submit, urls)
            eventually(partial(_is_staged, directory), "a part of the list is staged")
            process.kill()
            if isinstance(sent.exception(), httpx.TransportError):
                return directory
        # On a busy machine the answer may come before the kill.
    raise AssertionError("each list was staged before its server was killed")


def _is_staged(directory: Path) -> bool | None:
    return bool(body_files(directory)) or None
