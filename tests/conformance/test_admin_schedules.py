"""`conveyor admin schedules`: the schedules of all callers, listed, and paused for one key."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest

from conveyor.bootstrap.production import open_records
from conveyor.clock import SystemClock
from conveyor.domain.api_keys import key_hash
from conveyor.domain.errors import ConveyorError
from conveyor.domain.schedule import Schedule
from conveyor.domain.scheduling import FireStatus, Scheduling, SkipReason
from conveyor.prod.admin.resources import TableResource
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.store import DynamoStore
from conveyor.roles import admin
from conveyor.settings import Settings, load
from conveyor.testing.clock import FakeClock
from tests.conformance.emulators import REGION, address, aws_options
from tests.conformance.scheduled_jobs import HOUR, read_job, schedule_job
from tests.conformance.world import World

pytestmark = pytest.mark.extended

CLOCK = SystemClock()
ALICE, BOB = key_hash("alice"), key_hash("bob")


@dataclass
class Fleet:
    """A table with scheduled jobs, and the file of keys."""

    settings: Settings
    world: World
    store: DynamoStore

    async def said(self) -> str:
        """The lines of the list."""
        lines: list[str] = []
        assert await admin.list_schedules(self.settings, lines.append) == 0
        return "\n".join(lines)

    async def changed(self, key: str, *, paused: bool) -> tuple[int, list[str]]:
        """The exit code of a change, and what it says."""
        lines: list[str] = []
        code = await admin.set_schedules(self.settings, lines.append, key, paused=paused)
        return code, lines

    async def scheduling(self, job_id: str) -> Scheduling:
        """The scheduling of a job as it stands."""
        found = (await read_job(self.world, job_id)).scheduling
        assert found is not None
        return found


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE} alice\n")
    settings = load(
        {},
        production=True,
        environment=f"test-{secrets.token_hex(6)}",
        region=REGION,
        bucket="none",
        ledger="dynamodb",
        dynamodb_endpoint=address("CONVEYOR_TEST_DYNAMODB"),
        api_keys=str(keys),
    )
    options = aws_options(dynamodb_endpoint=settings.dynamodb_endpoint)
    aws = await open_aws(options, CLOCK, "dynamodb")
    async with aclosing(aws):
        table = TableResource(aws, settings.table_name, CLOCK)
        await table.ensure()
        async with open_records(settings, CLOCK) as store:
            yield Fleet(settings, World(store, FakeClock(start=CLOCK.now())), store)
        await table.remove()


async def test_schedules_are_listed_and_a_key_that_is_gone_is_marked(fleet: Fleet) -> None:
    assert await fleet.said() == "no scheduled jobs"
    jobs = [await schedule_job(fleet.world, key_hash=key) for key in (ALICE, BOB)]
    await schedule_job(fleet.world, key_hash=BOB, paused=True, next_at=None)
    said = await fleet.said()
    listed = {line.split()[0]: line for line in said.splitlines()[1::2]}

    assert len(listed) == 3
    assert listed[jobs[0].job_id].endswith("  known")
    assert listed[jobs[1].job_id].endswith("  not in CONVEYOR_API_KEYS")
    assert said.count(f"  {BOB}\n") + said.endswith(f"  {BOB}") == 2
    assert sum(" paused  none " in line for line in listed.values()) == 1
    assert all(len(line) <= 80 for line in said.splitlines())


async def test_without_the_keys_none_is_said_to_be_known(fleet: Fleet) -> None:
    await schedule_job(fleet.world, key_hash=BOB)
    fleet.settings = replace(fleet.settings, api_keys="")
    said = await fleet.said()
    assert said.splitlines()[1].endswith("  not checked")
    assert "known" not in said


async def test_all_schedules_of_one_key_are_paused_and_resumed(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    hers = [(await schedule_job(fleet.world, key_hash=ALICE)).job_id for _ in range(3)]
    his = (await schedule_job(fleet.world, key_hash=BOB)).job_id
    code, said = await fleet.changed(ALICE, paused=True)

    assert (code, said) == (0, [f"{job_id} paused" for job_id in sorted(hers)])
    assert [(await fleet.scheduling(job_id)).paused for job_id in [*hers, his]] == [
        *[True] * 3,
        False,
    ]
    lines: list[str] = []
    await admin.set_schedules(fleet.settings, lines.append, ALICE, paused=True, as_json=True)
    was = {"state": "paused", "changed": False}
    assert [json.loads(line) for line in lines] == [{"job_id": one, **was} for one in sorted(hers)]
    again = await fleet.changed(ALICE, paused=True)
    assert again == (0, [f"{job_id} was paused already" for job_id in sorted(hers)])
    code, said = await fleet.changed(ALICE, paused=False)
    assert (code, said) == (0, [f"{job_id} resumed" for job_id in sorted(hers)])
    assert await fleet.changed(key_hash("nobody"), paused=True) == (
        1,
        ["no schedule belongs to that key"],
    )
    lines.clear()
    nobody = key_hash("nobody")
    code = await admin.set_schedules(
        fleet.settings, lines.append, nobody, paused=True, as_json=True
    )
    assert (code, lines) == (1, [])
    assert capsys.readouterr().err == "no schedule belongs to that key\n"


async def test_resuming_notes_what_was_due_meanwhile_as_skipped(fleet: Fleet) -> None:
    now = fleet.world.now
    job = await schedule_job(
        fleet.world,
        key_hash=ALICE,
        paused=True,
        anchor=now - 3 * HOUR,
        next_at=now - 2 * HOUR,
        next_nominal="",
    )
    await fleet.changed(ALICE, paused=False)

    after = await fleet.scheduling(job.job_id)
    [row] = await fleet.store.schedules.list_fires(job.job_id, before=None, limit=10)
    assert not after.paused
    assert after.next_at is not None
    assert after.next_at > now
    assert (row.status, row.reason) == (FireStatus.SKIPPED, SkipReason.PAUSED)
    assert await fleet.store.runs.get_run(job.caller, job.job_id, None) is None


async def test_a_schedule_of_a_zone_that_is_gone_is_listed_and_paused(fleet: Fleet) -> None:
    now = fleet.world.now
    gone = Schedule(at="2027-09-01T09:00", timezone="Mars/Phobos")
    job = await schedule_job(fleet.world, schedule=gone, key_hash=ALICE, next_at=now - HOUR)
    for paused in (True, False):
        assert (await fleet.changed(ALICE, paused=paused))[0] == 0
        assert (await fleet.scheduling(job.job_id)).paused == paused
    assert job.job_id in await fleet.said()


async def test_a_change_beside_others_comes_through(fleet: Fleet) -> None:
    job_id = (await schedule_job(fleet.world, key_hash=ALICE)).job_id
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(_pause, fleet)
    assert (await fleet.scheduling(job_id)).paused


async def _pause(fleet: Fleet) -> None:
    assert (await fleet.changed(ALICE, paused=True))[0] == 0


async def test_a_missing_table_is_told(fleet: Fleet) -> None:
    elsewhere = replace(fleet.settings, environment="nowhere")
    with pytest.raises(ConveyorError) as caught:
        await admin.list_schedules(elsewhere, print)
    assert "conveyor-nowhere" in caught.value.detail
