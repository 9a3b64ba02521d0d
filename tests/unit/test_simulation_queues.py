"""The simulated queues beyond the port: undercounts, repeats, lost answers, and figures.

The conformance tests show that they keep the port.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    Delivery,
    QueueMissing,
    TaskMessage,
    run_queue,
)
from conveyor.simulation.latency import Latency
from conveyor.simulation.link import Gate, ProcessKilled
from conveyor.simulation.queues import QueueService, SimulatedQueues
from tests.unit.simulated_parts import Place, in_place

JOB, RUN = "JOB", "RUN"
QUEUE = run_queue(RUN)
SLOW = Latency(0.2)


class Nothing:
    """The rows of no run."""

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        """None is left."""
        return []

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """No task has a host."""
        return [""] * len(tasks)


def _service(place: Place, *, tasks: int = 0, partitions: int = 1, asked: int = 1) -> QueueService:
    service = QueueService(
        place.time,
        place.trace,
        Nothing(),
        partitions=partitions,
        partitions_asked=asked,
    )
    service.send_tasks(JOB, RUN, [(index, f"t{index}") for index in range(tasks)])
    return service


async def _receive(queues: SimulatedQueues, *, wait: float = 0.0) -> list[Delivery]:
    return await queues.receive(QUEUE, limit=10, visibility=30, wait=wait)


def test_a_short_poll_may_find_nothing_and_a_long_one_finds_what_is_there() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=1, partitions=4, asked=2)
        queues = SimulatedQueues(service, place.link(Gate()))
        found = []
        for _ in range(200):
            batch = await _receive(queues)
            found.append(len(batch))
            await queues.change_visibility(QUEUE, [one.receipt for one in batch], visibility=0)
        assert 60 <= sum(found) <= 140
        assert service.empties == 200 - sum(found)
        for _ in range(20):
            batch = await _receive(queues, wait=1.0)
            assert len(batch) == 1
            await queues.change_visibility(QUEUE, [batch[0].receipt], visibility=0)
        assert place.time.seconds() == 0

    in_place(main)


def test_a_long_poll_takes_from_every_partition() -> None:
    async def main(place: Place) -> None:
        queues = SimulatedQueues(
            _service(place, tasks=8, partitions=4, asked=2), place.link(Gate())
        )
        assert len(await _receive(queues)) == 4
        assert len(await _receive(queues, wait=1.0)) == 4

    in_place(main)


def test_asking_all_partitions_finds_every_message_once() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=95, partitions=4, asked=4)
        queues = SimulatedQueues(service, place.link(Gate()))
        sizes: list[int] = []
        names: set[str] = set()
        while batch := await _receive(queues):
            sizes.append(len(batch))
            names |= {one.message.task_id for one in batch if isinstance(one.message, TaskMessage)}
        assert (sizes, len(names)) == ([10] * 9 + [5], 95)

    in_place(main)


def test_lost_answers_are_errors_and_half_of_the_calls_are_applied() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=400)
        service.lost_answers = 1.0
        queues = SimulatedQueues(service, place.link(Gate()))
        while batch := await _receive(queues):
            for delivery in batch:
                with pytest.raises(ConveyorError, match="lost"):
                    await queues.delete(QUEUE, [delivery.receipt])
        assert 150 <= service.depth(QUEUE) <= 250

    in_place(main)


def test_duplicates_come_within_the_visibility_even_when_acknowledged() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=200)
        service.duplicates = 0.5
        queues = SimulatedQueues(service, place.link(Gate()))
        for _ in range(20):
            batch = await _receive(queues)
            await queues.delete(QUEUE, [one.receipt for one in batch])
        service.duplicates = 0.0
        assert 60 <= service.depth(QUEUE) <= 140
        await place.time.sleep(30)
        again = await _receive(queues)
        assert {one.receive_count for one in again} == {1}

    in_place(main)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_on_its_way_to_whom(killed: bool, seed: int) -> None:
    """A cancelled receive gives back what it took; a killed process cannot."""

    async def main(place: Place) -> None:
        gate = Gate()
        service = _service(place, tasks=1)
        queues = SimulatedQueues(service, place.link(gate, process=f"w{seed}", latency=SLOW))
        async with anyio.create_task_group() as group:
            group.start_soon(_quietly, queues)
            await place.time.sleep(0.1)
            taken = service.received
            if killed:
                gate.kill()
            group.cancel_scope.cancel()
        other = SimulatedQueues(service, place.link(Gate()))
        expected = 0 if killed and taken else 1
        assert len(await _receive(other)) == expected
        await place.time.sleep(30)
        assert len(await _receive(other)) == 1

    in_place(main)


async def _quietly(queues: SimulatedQueues) -> None:
    try:
        await _receive(queues)
    except ProcessKilled:
        return


def test_a_killed_process_is_served_by_chance_before_or_after_its_death() -> None:
    """So both are tried: what it asked for has happened, or it has not."""

    async def main(place: Place) -> None:
        outcomes = set()
        for number in range(20):
            gate = Gate()
            service = _service(place, tasks=1)
            queues = SimulatedQueues(service, place.link(gate, process=f"w{number}", latency=SLOW))
            async with anyio.create_task_group() as group:
                group.start_soon(_quietly, queues)
                await place.time.sleep(0.1)
                gate.kill()
            outcomes.add(service.received)
        assert outcomes == {0, 1}

    in_place(main)


def test_a_queue_may_take_a_while_to_exist() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=1)
        service.young = 1.0
        queues = SimulatedQueues(service, place.link(Gate()))
        with pytest.raises(QueueMissing):
            await _receive(queues)
        assert await queues.receive(CONTROL_QUEUE, limit=1, visibility=1) == []
        await place.time.sleep(1.0)
        assert len(await _receive(queues)) == 1

    in_place(main)


def test_the_control_queue_is_left_out_of_the_figures() -> None:
    async def main(place: Place) -> None:
        service = _service(place)
        queues = SimulatedQueues(service, place.link(Gate()))
        await queues.send(CONTROL_QUEUE, DeleteMessage(JOB, RUN))
        for _ in range(2):
            await queues.receive(CONTROL_QUEUE, limit=1, visibility=1)
        assert (service.calls, service.empties, service.received, service.on_hand) == (0, 0, 0, 0)

    in_place(main)


def test_messages_are_on_hand_until_settled_given_back_hidden_otherwise_or_lapsed() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=6)
        queues = SimulatedQueues(service, place.link(Gate()))
        first, second, third, fourth, *_ = await _receive(queues)
        assert (service.on_hand, service.peak_on_hand) == (6, 6)
        await queues.change_visibility(QUEUE, [first.receipt], visibility=30)
        assert service.on_hand == 6
        await queues.delete(QUEUE, [first.receipt])
        await queues.change_visibility(QUEUE, [second.receipt], visibility=5)
        await queues.change_visibility(QUEUE, [third.receipt], visibility=0)
        assert isinstance(fourth.message, TaskMessage)
        service.settled(fourth.message.task_id)
        assert service.on_hand == 2
        await queues.delete(QUEUE, [fourth.receipt])
        assert service.on_hand == 2
        await place.time.sleep(30)
        assert await queues.receive(QUEUE, limit=0, visibility=1) == []
        assert (service.on_hand, service.peak_on_hand) == (0, 6)

    in_place(main)


def test_what_no_message_names_can_be_told() -> None:
    async def main(place: Place) -> None:
        service = _service(place, tasks=3)
        [first, *_] = await _receive(SimulatedQueues(service, place.link(Gate())))
        service.delete(QUEUE, [first.receipt])
        assert service.holds(RUN) == {"t1", "t2"}
        service.drop(RUN)
        assert service.holds(RUN) == set()

    in_place(main)
