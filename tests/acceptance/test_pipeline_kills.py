"""kill -9 at each step between a claim and an acknowledgement: a call that never began counts for
nothing, one that began is made again unless its end was written down."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conveyor.testing.gateway_server import GatewayServer
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_data import rows_left, rows_of, server
from tests.acceptance.support_held import HeldCalls, held_gateway
from tests.acceptance.support_wire import Wire, eventually, target
from tests.acceptance.test_kills import assert_bodies, assert_histories
from tests.disk import body_files

pytestmark = pytest.mark.server

IN_FLIGHT = 10
TASKS = 30

NEVER = """
import asyncio

async def never(*_args, **_named):
    await asyncio.Event().wait()
"""
HANDLER = "from conveyor.handlers.task import TaskHandler\n"
TABLES = "from conveyor.dev.sqlite.tasks import SqliteTasks\n"


@dataclass(frozen=True)
class Step:
    """A step of the pipeline at which a server stops: the patch that stops it, and whether calls
    end, end in a body, and end in a settlement."""

    patch: str
    called: bool = True
    answered: bool = True
    stored: bool = False
    settled: bool = False


STEPS = {
    "claimed, not called for": Step(f"{HANDLER}TaskHandler.begin = never", called=False),
    "called for, not answered": Step("", answered=False),
    "answered, not stored": Step(
        "from conveyor.dev.files import FileBlobs\nFileBlobs.put_new = never"
    ),
    "stored, not settled": Step(
        f"{TABLES}SqliteTasks.settle_task = SqliteTasks.settle_tasks = never", stored=True
    ),
    "settled, not acknowledged": Step(
        "from conveyor.engine.delivery import AckBatcher\nAckBatcher.add = never",
        stored=True,
        settled=True,
    ),
}


@contextmanager
def stopping_at(step: Step, tmp_path: Path, gateway: str) -> Iterator[ServerProcess]:
    """A server that gets no further than a step."""
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(NEVER + step.patch)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CONVEYOR_")}
    environment = {**inherited, "PYTHONPATH": str(patched)}
    data = tmp_path / "data"
    with ServerProcess(data, "--gateway", gateway, environment=environment) as process:
        yield process


def is_there(step: Step, data: Path, gateway: GatewayServer) -> Callable[[], bool | None]:
    """Return whether a server has come as far as a step lets it."""

    def look() -> bool | None:
        [(claims,)] = rows_of(data, "SELECT count(*) FROM claims")
        [(ended,)] = rows_of(data, "SELECT count(*) FROM tasks WHERE state > 0")
        calls = gateway.hits.total
        in_hand = claims + ended == IN_FLIGHT
        called = calls == (IN_FLIGHT if step.called else 0)
        over = gateway.hits.in_flight == (0 if step.answered else IN_FLIGHT)
        stored = bool(body_files(data)) is step.stored
        settled = bool(ended) is step.settled
        return (in_hand and called and (over or not step.called) and stored and settled) or None

    return look


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_kill_repeats_only_calls_that_began_and_were_not_settled(
    tmp_path: Path, step: Step
) -> None:
    data = tmp_path / "data"
    urls = [target(f"step/{number}", delay=0 if step.answered else 1) for number in range(TASKS)]
    with held_gateway() as (gateway, calls):
        with stopping_at(step, tmp_path, gateway.url) as process:
            with Wire(process.info.api) as wire:
                job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            eventually(is_there(step, data, gateway), "the server comes to the step")
            process.kill()
        called = gateway.hits.total
        [(ended,)] = rows_left(data, "SELECT count(*) FROM tasks WHERE state > 0")
        [(claims,)] = rows_left(data, "SELECT count(*) FROM claims")
        assert claims + ended == IN_FLIGHT
        assert bool(ended) is step.settled
        calls.release()
        repeated = claims if step.called else 0
        with (
            server(data, "--gateway", gateway.url) as process,
            Wire(process.info.api) as wire,
        ):
            run = wire.ended(job_id)
            assert run["stats"]["successful"] == run["stats"]["total"] == TASKS
            assert assert_histories(wire, data, job_id) == repeated
            assert_bodies(wire, job_id)
            assert gateway.hits.total == TASKS + repeated
            # What the killed process had stored and not settled is gone.
            assert len(body_files(data)) == TASKS
            assert called == (IN_FLIGHT if step.called else 0)
            assert wire.send("DELETE", f"/jobs/{job_id}").status_code == 202
            eventually(lambda: not body_files(data) or None, "no body is left, named or not")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "of noise": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_where_the_table_of_calls_is_damaged_every_claim_counts_as_interrupted(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    step, data = STEPS["claimed, not called for"], tmp_path / "data"
    urls = [target(f"damaged/{number}") for number in range(TASKS)]
    calls: HeldCalls
    with held_gateway() as (gateway, calls):
        calls.release()
        with stopping_at(step, tmp_path, gateway.url) as process:
            with Wire(process.info.api) as wire:
                job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            eventually(is_there(step, data, gateway), "tasks are claimed")
            process.kill()
        damage(data / "calls")
        with (
            server(data, "--gateway", gateway.url) as process,
            Wire(process.info.api) as wire,
        ):
            assert wire.ended(job_id)["stats"]["successful"] == TASKS
            assert assert_histories(wire, data, job_id) == IN_FLIGHT
        assert gateway.hits.total == TASKS
