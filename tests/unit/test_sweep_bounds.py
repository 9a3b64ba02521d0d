"""Sweeps that find more than they can do: each ends with its claim, and the next one goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from conveyor.aio.concurrency import REST
from conveyor.domain.model import RunStatus
from conveyor.handlers import sweep as sweep_quiet
from conveyor.handlers.sweep import BUDGET, CLAIM_SHARE
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.records.blob_keys import BODIES_A_STEP, run_prefix
from tests.conformance.world import all_ended
from tests.unit.http_api import Api, open_api
from tests.unit.sweep_world import DAY, INTERVAL, QUIET, ManyBodies, run_id_of, slot_of, sweep_over

CLAIM = INTERVAL * CLAIM_SHARE


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


async def test_a_run_of_many_bodies_keeps_no_sweep_beyond_its_claim(api: Api) -> None:
    step = 0.5
    jobs = [await api.submit(1, result_ttl_days=1) for _ in range(2)]
    for job in jobs:
        await api.drain(job)
    prefixes = [run_prefix(job["job_id"], run_id_of(job), 400) for job in jobs]
    counts = {prefixes[0]: 40 * BODIES_A_STEP, prefixes[1]: 1}
    bodies = ManyBodies(api.clock, seconds=step, bodies=counts)
    workers = [sweep_over(api, blobs=bodies) for _ in range(2)]
    await api.clock.advance(2 * DAY)
    began = api.clock.monotonic()
    sweeps = 0
    while any(bodies.bodies.values()):
        sweep_began, done = api.clock.monotonic(), len(bodies.steps)
        await workers[sweeps % 2].sweeper.sweep()
        sweeps += 1
        assert api.clock.monotonic() - sweep_began <= BUDGET + step < CLAIM
        assert len(bodies.steps) - done <= BUDGET / (step * (1 + REST)) + 1
        await api.clock.advance(INTERVAL)
        assert sweeps <= 10
    assert len(bodies.steps) == 41
    assert set(bodies.bodies.values()) == {0}
    assert 40 * step <= (api.clock.monotonic() - began) / (1 + REST)
    ended = await all_ended(api.binding, api.clock.now())
    assert [run.swept for run in ended] == [True, True]


async def test_a_rest_that_a_sweep_does_not_see_the_end_of_is_kept_by_the_next(api: Api) -> None:
    step = 10.0
    job = await api.submit(1, result_ttl_days=1)
    await api.drain(job)
    prefix = run_prefix(job["job_id"], run_id_of(job), 400)
    bodies = ManyBodies(api.clock, seconds=step, bodies={prefix: 3 * BODIES_A_STEP})
    sweep = sweep_over(api, blobs=bodies)
    await sweep.look(after=2 * DAY)
    for _ in range(5):
        await sweep.look()
    assert len(bodies.steps) == 3
    [first, second, third] = bodies.steps
    assert min(second - first, third - second) >= step * (1 + REST)


async def test_more_expired_files_than_a_sweep_can_remove_are_left_to_the_next(api: Api) -> None:
    for _ in range(5):
        await slot_of(api, lives=1)
        await _export(api)
    sweep = sweep_over(api, blobs=ManyBodies(api.clock, seconds=CLAIM / 2, bodies={}))

    async def left() -> tuple[int, int]:
        now = api.clock.now()
        inputs = await api.binding.inputs.expired_inputs(now=now, limit=9)
        return len(inputs), len(await api.binding.exports.expired_exports(now=now, limit=9))

    seen: list[tuple[int, int]] = []
    for _ in range(4):
        await sweep.look()
        seen.append(await left())
    assert seen == [(3, 4), (1, 3), (0, 2), (0, 0)]


@pytest.mark.parametrize("pause", [INTERVAL, QUIET + 1])
async def test_more_quiet_runs_than_a_sweep_can_look_at_come_each_in_turn(
    api: Api, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run_id_of(await api.submit(1)) for _ in range(5)]
    sweep = sweep_over(api)
    reconcile = sweep.binding.sweeping.reconcile_run
    looked_at: list[str] = []

    async def reconcile_slowly(run_id: str, *, now: int) -> RunStatus | None:
        looked_at.append(run_id)
        await api.clock.advance(2 * INTERVAL)
        return await reconcile(run_id, now=now)

    monkeypatch.setattr(sweep.binding.sweeping, "reconcile_run", reconcile_slowly)
    # After three of them the first is due again, and has to wait for the others; with the longer
    # pause even the latest one is.
    assert 3 * (2 * INTERVAL + pause) > QUIET
    await sweep.look(after=QUIET + 1)
    for number in range(1, 10):
        assert len(looked_at) == number
        await sweep.look(after=pause)
    assert looked_at == runs * 2


async def test_references_of_a_quiet_run_are_sent_until_the_claim_ends(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_quiet, "PIECE", 2)
    run_id = run_id_of(await api.submit(9))
    sweep = sweep_over(api)
    send = sweep.outbox.send_tasks

    async def send_slowly(job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        await send(job_id, run_id, tasks)
        await api.clock.advance(CLAIM / 2)

    monkeypatch.setattr(sweep.outbox, "send_tasks", send_slowly)
    pieces = [(run_id, [0, 1]), (run_id, [2, 3]), (run_id, [4, 5]), (run_id, [6, 7]), (run_id, [8])]
    await sweep.look(after=QUIET + 1)
    assert sweep.outbox.references == pieces[:2]
    await sweep.look()
    assert sweep.outbox.references == pieces[:4]
    await sweep.look()
    assert sweep.outbox.references == pieces


async def _export(api: Api) -> None:
    """An export past its time."""
    job = await api.submit(1)
    now = api.clock.now()
    export = Export(
        export_id=api.clock.new_id(),
        job_id=job["job_id"],
        run_id=run_id_of(job),
        format=ExportFormat.ZIP,
        status=ExportStatus.PENDING,
        created_at=now,
        updated_at=now,
        expires_at=now + 1,
    )
    await api.binding.exports.create_export(export)
