"""The contract of every inputs adapter, sentence by sentence of the port."""

from __future__ import annotations

from conveyor.ports.binding import Inputs
from conveyor.ports.inputs import CsvSpec, InputType, JobInput
from conveyor.testing.clock import FakeClock

HOUR = 3_600_000


def slot(clock: FakeClock, *, lives: int = 24 * HOUR, csv: CsvSpec | None = None) -> JobInput:
    """A slot, not written yet, that lives so many milliseconds."""
    now = clock.now()
    return JobInput(
        input_id=clock.new_id(),
        caller="caller",
        type=InputType.CSV if csv is not None else InputType.URLS,
        content_type="text/csv" if csv is not None else "text/plain",
        created_at=now,
        upload_until=now + lives // 2,
        expires_at=now + lives,
        csv=csv,
    )


async def test_a_slot_comes_back_as_it_was_written(inputs: Inputs, clock: FakeClock) -> None:
    by_index = slot(clock, csv=CsvSpec(url=3, delimiter="\t", quote="'"))
    by_name = slot(
        clock, csv=CsvSpec(url='a "b"\n', external_id="名前", delimiter="é", header=True)
    )
    plain = slot(clock)
    for one in (by_index, by_name, plain):
        await inputs.create_input(one)

    for one in (by_index, by_name, plain):
        assert await inputs.get_input(one.input_id) == one
    assert await inputs.get_input(clock.new_id()) is None


async def test_uploads_are_noted_and_the_last_one_counts(inputs: Inputs, clock: FakeClock) -> None:
    one, other = slot(clock), slot(clock)
    await inputs.create_input(one)
    await inputs.create_input(other)

    sizes = []
    for size in (7, 0, 5_000_000_000):
        assert await inputs.input_uploaded(one.input_id, size=size)
        found = await inputs.get_input(one.input_id)
        assert found is not None
        sizes.append(found.size)

    assert sizes == [7, 0, 5_000_000_000]
    assert await inputs.get_input(other.input_id) == other


async def test_an_upload_into_a_slot_that_is_gone_is_told(inputs: Inputs, clock: FakeClock) -> None:
    one = slot(clock)
    assert not await inputs.input_uploaded(one.input_id, size=1)
    await inputs.create_input(one)
    await inputs.drop_input(one.input_id)

    assert not await inputs.input_uploaded(one.input_id, size=1)
    assert await inputs.get_input(one.input_id) is None


async def test_expired_slots_are_found_and_still_readable(inputs: Inputs, clock: FakeClock) -> None:
    slots = [slot(clock, lives=hours * HOUR) for hours in (3, 1, 2)]
    for one in slots:
        await inputs.create_input(one)
    start = clock.now()

    assert await inputs.expired_inputs(now=start + HOUR - 1, limit=10) == []
    assert await inputs.expired_inputs(now=start + HOUR, limit=10) == [slots[1].input_id]
    found = await inputs.expired_inputs(now=start + 3 * HOUR, limit=10)
    assert sorted(found) == sorted(one.input_id for one in slots)
    assert len(await inputs.expired_inputs(now=start + 3 * HOUR, limit=2)) == 2
    assert await inputs.get_input(slots[1].input_id) == slots[1]


async def test_dropping_removes_one_slot_and_may_be_repeated(
    inputs: Inputs, clock: FakeClock
) -> None:
    one, other = slot(clock, lives=HOUR), slot(clock, lives=HOUR)
    await inputs.create_input(one)
    await inputs.create_input(other)

    for _ in range(2):
        await inputs.drop_input(one.input_id)

    assert await inputs.get_input(one.input_id) is None
    assert await inputs.expired_inputs(now=clock.now() + HOUR, limit=10) == [other.input_id]
