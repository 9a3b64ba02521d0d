"""Packs of bodies: what is written together and when, and what becomes of it while the store is
away, refuses, or has bodies that no row will name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.aio.resilience import CircuitBreaker
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.packs import (
    GATHERING,
    LAST_PATIENCE,
    PACKED_MOST,
    PATIENCE,
    BodyPacks,
    StoppableWrites,
)
from conveyor.ports.blobs import BlobWriter, BodyRefused, Content
from conveyor.records.blob_keys import checked_key, result_key, run_prefix
from conveyor.records.packed_bodies import (
    RANGE_BYTES,
    PackedBody,
    neighbours,
    pack_key,
    packed_bodies,
    packed_body,
    place_body,
)
from conveyor.testing.clock import FakeClock


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def key_of(number: int, *, run: str = "RUN") -> str:
    """Return the key of the body of a task."""
    return result_key("JOB", run, f"{number:07}ABCDEF", 1, 30)


class Shelf(BlobWriter):
    """A store in memory that fails as `trouble` says; `puts` are all tries."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.puts: list[tuple[str, bytes]] = []
        self.trouble: Callable[[bytes], Exception | None] = lambda _body: None
        self.hangs = False

    async def put(self, key: str, content: Content) -> int:
        assert isinstance(content, bytes)
        self.puts.append((checked_key(key), content))
        if self.hangs:
            await anyio.sleep_forever()
        error = self.trouble(content)
        if error is not None:
            raise error
        self.bodies[key] = content
        return len(content)

    async def delete(self, key: str) -> None:
        self.bodies.pop(key, None)

    def read(self, key: str) -> bytes | None:
        """Return the body that a row names."""
        place = packed_body(key)
        if place is None:
            return self.bodies.get(key)
        return place.checked(self.bodies.get(place.pack, b"")[place.offset : place.end])


@dataclass
class Bench:
    """Packs over a shelf, whose puts run beside the test. `found` are their keys or errors, by the
    key of the body."""

    clock: FakeClock = field(default_factory=FakeClock)
    shelf: Shelf = field(default_factory=Shelf)
    telemetry: Telemetry = field(default_factory=Telemetry)
    found: dict[str, str | Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(self.clock, dependency="the store")
        self.packs = BodyPacks(
            self.shelf, self.clock, breaker=self.breaker, observer=self.telemetry
        )

    def put(self, key: str, body: bytes) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return what puts a body."""

        async def put() -> None:
            try:
                self.found[key] = await self.packs.put(key, body)
            except Exception as error:
                self.found[key] = error

        return put

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        await self.clock.advance(seconds)

    def named(self, key: str) -> str:
        """Return the key that the row of a body is to name."""
        found = self.found[key]
        assert isinstance(found, str)
        return found


def away(_body: bytes) -> Exception:
    """Take nothing."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")


async def test_a_pack_that_was_full_takes_no_other_pack_of_its_run_from_those_open() -> None:
    bench = Bench()
    large = [bytes([number]) * PACKED_MOST for number in range(RANGE_BYTES // PACKED_MOST)]
    async with anyio.create_task_group() as group:
        for number, body in enumerate([*large, b"the first of the next"]):
            group.start_soon(bench.put(key_of(number), body))
            await bench.advance(0.0)
        await bench.advance(GATHERING / 3)
        group.start_soon(bench.put(key_of(len(large) + 1), b"and the second"))
        await bench.advance(2 * GATHERING)
    full, next_one = (content for _, content in bench.shelf.puts)
    assert full == b"".join(large)
    assert next_one == b"the first of the nextand the second"
    assert not bench.packs._open


async def test_bodies_of_a_run_that_end_close_together_are_one_object_of_the_run() -> None:
    bench = Bench()
    bodies = {key_of(number): b"body %d" % number for number in range(5)}
    async with anyio.create_task_group() as group:
        for key, body in bodies.items():
            group.start_soon(bench.put(key, body))
            await bench.advance(GATHERING / 5.1)
        assert not bench.found
        await bench.advance(GATHERING)
    [(pack, content)] = bench.shelf.puts
    assert pack.startswith(run_prefix("JOB", "RUN", 30))
    assert content == b"".join(bodies.values())
    assert {key: bench.shelf.read(bench.named(key)) for key in bodies} == bodies
    figures = {name: bench.telemetry.counts[name] for name in _FIGURES}
    assert figures == dict(zip(_FIGURES, (1, 5, len(content)), strict=True))


_FIGURES = ("body_objects", "packed_bodies", "packed_bytes")


async def test_a_body_that_ends_later_or_of_another_run_is_in_another_object() -> None:
    bench = Bench()
    other = key_of(1, run="OTHER")
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(key_of(1), b"one"))
        group.start_soon(bench.put(other, b"other"))
        await bench.advance(GATHERING + 0.01)
        group.start_soon(bench.put(key_of(2), b"two"))
        await bench.advance(GATHERING + 0.01)
    # Each of them is alone: under its own key, so that it can be linked to.
    assert bench.shelf.bodies == {key_of(1): b"one", other: b"other", key_of(2): b"two"}
    assert bench.found == {key: key for key in bench.shelf.bodies}


async def test_large_and_empty_bodies_go_alone_and_at_once() -> None:
    bench = Bench()
    large, empty = key_of(1), key_of(2)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(large, bytes(PACKED_MOST + 1)))
        group.start_soon(bench.put(empty, b""))
        await bench.advance(0.001)
        assert bench.found == {large: large, empty: empty}


async def test_a_pack_is_written_once_it_is_full() -> None:
    bench = Bench()
    most = RANGE_BYTES // PACKED_MOST
    keys = [key_of(number) for number in range(most + 1)]
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.put(key, bytes(PACKED_MOST)))
            await bench.advance(0.001)
        assert bench.found.keys() == set(keys[:most])
        await bench.advance(GATHERING)
    assert [len(content) for _, content in bench.shelf.puts] == [RANGE_BYTES, PACKED_MOST]


async def test_a_stop_writes_at_once_what_waits_and_what_comes() -> None:
    bench = Bench()
    keys = [key_of(number) for number in range(3)]
    async with anyio.create_task_group() as group:
        for key in keys[:2]:
            group.start_soon(bench.put(key, b"waits"))
        await bench.advance(0.001)
        assert not bench.found
        bench.packs.stop()
        await bench.advance(0.001)
        assert bench.found.keys() == set(keys[:2])
        group.start_soon(bench.put(keys[2], b"comes"))
        await bench.advance(0.001)
        assert bench.found.keys() == set(keys)


async def test_what_the_store_does_not_take_is_kept_and_written_again() -> None:
    """Each try has the same bytes under the same key: one that comes late does no harm."""
    bench = Bench()
    bench.shelf.trouble = away
    keys = [key_of(number) for number in range(3)]
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.put(key, key.encode()))
        await bench.advance(PATIENCE - 20)
        assert not bench.found
        assert bench.packs.keeps_some
        assert not bench.breaker.is_closed
        # Tries are as rare as the breaker has them.
        assert 3 <= len(bench.shelf.puts) <= 6
        bench.shelf.trouble = lambda _body: None
        # The breaker would have the next one later: the last one does not ask it.
        await bench.advance(21)
    assert len(set(bench.shelf.puts)) == 1
    assert {key: bench.shelf.read(bench.named(key)) for key in keys} == {
        key: key.encode() for key in keys
    }
    assert bench.breaker.is_closed
    assert not bench.packs.keeps_some


async def test_a_body_is_lost_only_after_a_minute() -> None:
    bench = Bench()
    bench.shelf.trouble = away
    keys = [key_of(number) for number in range(2)]
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.put(key, b"body"))
        await bench.advance(PATIENCE)
        assert not bench.found
        await bench.advance(2)
        errors = [bench.found[key] for key in keys]
        assert all(isinstance(error, ConveyorError) for error in errors)
    assert not bench.packs.keeps_some
    assert not bench.shelf.bodies


async def test_a_stop_gives_a_store_that_is_away_a_last_chance() -> None:
    """Whatever the breaker says: there is no later."""
    bench = Bench()
    bench.shelf.trouble = away
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(key_of(1), b"body"))
        await bench.advance(15)
        tries = len(bench.shelf.puts)
        bench.packs.stop()
        await bench.advance(1)
        assert len(bench.shelf.puts) > tries
        assert not bench.found
        group.start_soon(bench.put(key_of(2), b"body"))
        await bench.advance(LAST_PATIENCE - 0.4)
        assert list(bench.found) == [key_of(1)]
        await bench.advance(2)
        assert len(bench.found) == 2


@pytest.mark.parametrize("kept", [0.0, 5.0, PATIENCE - 2, PATIENCE + 5])
async def test_a_stop_bounds_a_try_that_a_store_does_not_answer(kept: float) -> None:
    """The try began before the stop or after it, and the body was kept for long or not."""
    bench = Bench()
    if kept:
        bench.shelf.trouble = away
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(key_of(1), b"body"))
        await bench.advance(min(kept, PATIENCE - 2))
        bench.shelf.hangs = True
        await bench.advance(kept - min(kept, PATIENCE - 2))
        bench.packs.stop()
        await bench.advance(5)
        group.start_soon(bench.put(key_of(2), b"body"))
        await bench.advance(LAST_PATIENCE - 5 - 0.1)
        assert not bench.found
        await bench.advance(0.2)
        assert list(bench.found) == [key_of(1)]
        await bench.advance(5)
        assert len(bench.found) == 2
    assert all(isinstance(error, ConveyorError) for error in bench.found.values())
    assert not bench.packs.keeps_some
    assert not bench.breaker.is_closed


async def test_what_a_store_takes_late_after_a_stop_is_stored() -> None:
    """A call that is under way ends, whoever has given it up."""
    bench = Bench()
    asked = bench.shelf.put

    async def slow(key: str, content: Content) -> int:
        with anyio.CancelScope(shield=True):
            await bench.clock.sleep(LAST_PATIENCE + 5)
            size = await asked(key, content)
        return size

    bench.shelf.put = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(key_of(1), b"body"))
        await bench.advance(GATHERING)
        bench.packs.stop()
        await bench.advance(LAST_PATIENCE + 6)
    assert bench.found == {key_of(1): key_of(1)}
    assert bench.breaker.is_closed


@pytest.mark.parametrize(("hangs", "puts"), [(LAST_PATIENCE + 13, 1), (LAST_PATIENCE - 3, 2)])
async def test_a_put_that_cannot_be_left_is_made_again_only_in_time(
    hangs: float, puts: int
) -> None:
    """As boto3 makes it, on a thread."""
    bench = Bench()
    tried: list[str] = []
    ended: list[Exception] = []

    async def put(key: str, content: Content) -> int:
        tried.append(key)
        with anyio.CancelScope(shield=True):
            await bench.clock.sleep(hangs)
        await anyio.lowlevel.checkpoint()
        raise away(b"")

    async def store() -> None:
        try:
            await writes.put(key_of(1), b"body")
        except ConveyorError as error:
            ended.append(error)

    bench.shelf.put = put  # type: ignore[method-assign]
    writes = StoppableWrites(bench.shelf, bench.clock)
    async with anyio.create_task_group() as group:
        group.start_soon(store)
        await bench.advance(0)
        writes.stop()
        await bench.advance(hangs)
        await bench.advance(hangs)
        assert len(ended) == 1
    assert len(tried) == puts


@pytest.mark.parametrize("began", [-2 * LAST_PATIENCE, 4.0])
async def test_a_write_has_its_last_time_from_the_stop_or_from_its_beginning_after_it(
    began: float,
) -> None:
    """Seconds after the stop."""
    bench = Bench()
    bench.shelf.hangs = True
    ended: list[float] = []

    async def store() -> None:
        with pytest.raises(ConveyorError):
            await writes.put(key_of(1), b"body")
        ended.append(bench.clock.monotonic())

    writes = StoppableWrites(bench.shelf, bench.clock)
    async with anyio.create_task_group() as group:
        if began > 0:
            writes.stop()
            await bench.advance(began)
        group.start_soon(store)
        if began < 0:
            await bench.advance(-began)
            writes.stop()
        due = bench.clock.monotonic() + LAST_PATIENCE
        await bench.advance(2 * LAST_PATIENCE)
    assert ended == [due]


@pytest.mark.parametrize("refused", ["the pack", "a body"])
async def test_bodies_do_not_share_the_fate_of_one_that_is_refused(refused: str) -> None:
    bench = Bench()
    keys = [key_of(number) for number in range(3)]
    bad = keys[1].encode()

    def refuse(body: bytes) -> Exception | None:
        is_bad = len(body) > len(bad) or (refused == "a body" and body == bad)
        return BodyRefused("damaged on its way") if is_bad else None

    bench.shelf.trouble = refuse
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.put(key, key.encode()))
        await bench.advance(1)
    lost = [keys[1]] if refused == "a body" else []
    assert bench.shelf.bodies == {key: key.encode() for key in keys if key not in lost}
    assert [key for key in keys if isinstance(bench.found[key], BodyRefused)] == lost
    assert bench.breaker.is_closed


async def test_a_pack_is_removed_once_none_of_its_bodies_can_be_named() -> None:
    bench = Bench()
    keys = [key_of(number) for number in range(3)]
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.put(key, key.encode()))
        await bench.advance(1)
    first, second, third = map(bench.named, keys)
    for dropped in (first, second, second, first):
        await bench.packs.drop(dropped)
    assert bench.shelf.read(third) == keys[2].encode()
    await bench.packs.drop(third)
    assert not bench.shelf.bodies


async def test_what_is_alone_is_removed_at_once() -> None:
    bench = Bench()
    async with anyio.create_task_group() as group:
        group.start_soon(bench.put(key_of(1), b"body"))
        await bench.advance(1)
    await bench.packs.drop(bench.named(key_of(1)))
    assert not bench.shelf.bodies


async def test_nobody_waits_for_a_pack_whose_writer_was_cut_off() -> None:
    bench = Bench()
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as writer:
            writer.start_soon(bench.put(key_of(1), b"one"))
            await bench.advance(0.01)
            group.start_soon(bench.put(key_of(2), b"two"))
            await bench.advance(0.01)
            writer.cancel_scope.cancel()
        await bench.advance(0.01)
    assert isinstance(bench.found[key_of(2)], ConveyorError)
    assert not bench.shelf.puts


# -- keys --

PLACES = st.builds(
    place_body,
    st.sampled_from([pack_key(key_of(1)), pack_key(key_of(2))]),
    st.integers(0, RANGE_BYTES),
    st.binary(max_size=64),
)


@given(PLACES)
def test_a_key_tells_the_place_and_the_checksum(place: PackedBody) -> None:
    assert packed_body(checked_key(place.key)) == place
    assert packed_body(place.pack) is None


def test_the_key_of_a_body_of_its_own_tells_no_place() -> None:
    assert packed_body(key_of(1)) is None
    with pytest.raises(ValueError, match="not the key"):
        packed_bodies([place_body(pack_key(key_of(1)), 0, b"a").key, key_of(1)])


def test_no_two_packs_of_a_run_have_one_key_and_they_are_spread() -> None:
    keys = {pack_key(key_of(number)) for number in range(1_000)}
    prefix = run_prefix("JOB", "RUN", 30)
    assert len(keys) == 1_000
    assert len({key.removeprefix(prefix)[0] for key in keys}) == 16


@given(st.lists(PLACES, max_size=30))
def test_neighbours_are_read_together_within_bounds(places: list[PackedBody]) -> None:
    groups = neighbours(places)
    assert sorted(place for group in groups for place in group) == sorted(set(places))
    for group in groups:
        assert len({place.pack for place in group}) == 1
        assert max(place.end for place in group) - group[0].offset <= RANGE_BYTES
        bytes_read = max(place.end for place in group) - group[0].offset
        wanted = sum(place.size for place in group)
        assert bytes_read - wanted <= 256 * 1024 * (len(group) - 1)


def test_a_pack_of_small_bodies_is_one_read() -> None:
    pack = pack_key(key_of(1))
    places = [PackedBody(pack, 8_000 * number, 8_000, 0) for number in range(200)]
    assert len(neighbours(places)) == 1
    assert len(neighbours(places[:1] + places[100:])) == 2


def test_bytes_that_are_not_those_that_were_written_are_not_given_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = place_body(pack_key(key_of(1)), 5, b"body")
    assert place.checked(b"body") == b"body"
    assert [place.checked(read) for read in (b"bodY", b"bod", b"")] == [None] * 3
    assert caplog.messages == ["a stored body is damaged"] * 3
