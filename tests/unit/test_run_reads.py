"""The reads by which a worker makes sure that a run is live: shared and apart, and none older than
the claim that waits for it."""

from __future__ import annotations

from typing import Any

import anyio

from conveyor.domain.ids import task_id
from conveyor.ports.tasks import Claimed
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.run_reads import LEAST_APART
from conveyor.prod.dynamodb.tasks import DynamoTasks
from conveyor.simulation.loop import VirtualTime, run
from tests.memory_table import MemoryTable
from tests.unit.counting_fleet import CLAIM, FLUSH, RUN_ID, Fleet, Seam, Weather

TASKS = 120
SECONDS = 3.0


class Watched(Seam):
    """The calls of a process: when each read of the run's row began and was answered, and when the
    write of each claim was answered."""

    row: str
    reads: list[tuple[float, float]]
    claims: dict[str, float]

    async def call(self, service: str, operation: str, parameters: Parameters) -> Any:
        began = self.time.seconds()
        answer = await Seam.call(self, service, operation, parameters)
        if operation == "get_item" and parameters["Key"]["sk"]["S"] == self.row:
            self.reads.append((began, self.time.seconds()))
        elif operation == "update_item":
            self.claims[parameters["Key"]["sk"]["S"]] = self.time.seconds()
        return answer


async def claimed_at_random(time: VirtualTime) -> tuple[Watched, dict[int, float]]:
    """Claim the tasks of a run one by one, at any moments; when each was had."""
    fleet = Fleet(time, MemoryTable(time.seconds, time.sleep), TASKS)
    fleet.open()
    seam = Watched(fleet.table, time, Weather(), [])
    seam.row, seam.reads, seam.claims = fleet.place.key.sk, [], {}
    tasks = DynamoTasks(fleet.records(seam), worker="w", flush_interval=FLUSH, patience=30.0)
    had: dict[int, float] = {}

    async def claim(index: int) -> None:
        await time.sleep(SECONDS * fleet.table.random.random())
        now = fleet.clock.now()
        found = await tasks.claim_task(
            *(RUN_ID, task_id(RUN_ID, index)),
            worker="w",
            now=now,
            claimed_until=now + CLAIM,
            max_interruptions=100,
        )
        assert isinstance(found, Claimed)
        had[index] = time.seconds()

    async with anyio.create_task_group() as group:
        for index in range(TASKS):
            group.start_soon(claim, index)
    return seam, had


def test_reads_of_a_run_begin_a_tenth_of_a_second_apart() -> None:
    async def test(time: VirtualTime) -> None:
        seam, had = await claimed_at_random(time)
        assert len(had) == TASKS
        begun = sorted(began for began, _ in seam.reads)
        assert 10 < len(begun) <= SECONDS / LEAST_APART + 2
        for one, following in zip(begun, begun[1:], strict=False):
            assert following - one >= LEAST_APART - 1e-6

    run(test, backend="asyncio")


def test_a_claim_waits_for_a_read_that_began_after_it() -> None:
    """One that was under way may have been answered before: the run may have been stopped since."""

    async def test(time: VirtualTime) -> None:
        seam, had = await claimed_at_random(time)
        for index, moment in had.items():
            [written] = [
                at for key, at in seam.claims.items() if key.endswith(task_id(RUN_ID, index))
            ]
            assert any(began >= written and ended <= moment for began, ended in seam.reads)

    run(test, backend="asyncio")
