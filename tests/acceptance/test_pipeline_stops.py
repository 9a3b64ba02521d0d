"""Stopping, pausing and deleting a fast run: no call begins from a claim that waited for a slot."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_data import rows_of
from tests.acceptance.support_wire import Wire, eventually, target

pytestmark = pytest.mark.server

TASKS = 1_500


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Wire, ConveyorServer, Path]]:
    """A server with fewer slots than a job has permits."""
    data = tmp_path_factory.mktemp("fast")
    with conveyor_server(data, workers=20) as booted, Wire(booted.base_url) as wire:
        yield wire, booted, data


def made_since(booted: ConveyorServer, before: int) -> Callable[[], bool | None]:
    """Return whether some calls were made since there had been `before`."""
    return lambda: booted.hits.total > before + 50 or None


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("how", ["stop", "pause", "delete"])
def test_no_call_begins_once_the_request_is_answered(
    fast: tuple[Wire, ConveyorServer, Path], how: str
) -> None:
    wire, booted, data = fast
    draw = random.Random(how)
    for number in range(5):
        urls = [target(f"{how}/{number}/{one}", delay=0.002) for one in range(TASKS)]
        before = booted.hits.total
        job_id = wire.submit(urls)["job_id"]
        eventually(made_since(booted, before), "the run goes fast")
        time.sleep(draw.random() * 0.05)  # the moment is what the test varies
        if how == "delete":
            assert wire.send("DELETE", f"/jobs/{job_id}").status_code == 202
        else:
            wire.ask("POST", f"/jobs/{job_id}/{how}")
        called = booted.hits.total
        eventually(
            lambda: rows_of(data, "SELECT count(*) FROM claims") == [(0,)] or None,
            "no claim is left",
        )
        eventually(lambda: booted.hits.in_flight == 0 or None, "all calls end")
        assert booted.hits.total == called < before + TASKS
        if how == "pause":
            wire.ask("POST", f"/jobs/{job_id}/resume")
            assert wire.ended(job_id)["stats"]["successful"] == TASKS
            assert booted.hits.total == before + TASKS
    assert rows_of(data, "SELECT count(*) FROM tasks WHERE interruptions > 0") == [(0,)]
