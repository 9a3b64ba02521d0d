"""Bodies packed into segments: read as they were written or not at all, and removed with their
run."""

from __future__ import annotations

import errno
import io
import itertools
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.dev import segments
from conveyor.dev.binding import open_binding
from conveyor.dev.files import FileBlobs
from conveyor.dev.segments import PACKED_MOST, remove_unsettled
from conveyor.domain.model import StoredBody
from conveyor.domain.task_rules import Succeeded
from conveyor.records.blob_keys import result_key, run_prefix
from conveyor.records.packed_bodies import packed_body
from conveyor.testing.clock import FakeClock
from tests.conformance.world import World
from tests.disk import body_files, files_below
from tests.unit.export_world import made, manifest
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.test_task_batches import bench_over

RUN = run_prefix("J", "R", 30)
SOME = {f"{RUN}00000/{number}.1": b"%d" % number * number for number in range(50)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[FileBlobs]:
    blobs = FileBlobs(root)
    try:
        yield blobs
    finally:
        await blobs.aclose()


@pytest.fixture
async def blobs(tmp_path: Path, anyio_backend: str) -> AsyncIterator[FileBlobs]:
    async with opened(tmp_path) as blobs:
        yield blobs


async def put(blobs: FileBlobs, bodies: dict[str, bytes]) -> list[str]:
    """Store new bodies; return the keys that rows would name."""
    found = await blobs.put_new(list(bodies.items()))
    assert all(isinstance(key, str) for key in found), found
    return [str(key) for key in found]


async def read(blobs: FileBlobs, key: str, *, size: int | None = None) -> bytes | None:
    pieces = await blobs.open(key, size=size)
    return None if pieces is None else b"".join([piece async for piece in pieces])


async def read_all(blobs: FileBlobs, keys: Sequence[str]) -> list[bytes | None]:
    return [await read(blobs, key) for key in keys]


def segment_files(root: Path) -> list[Path]:
    return sorted(path for path in files_below(root) if path.parent.name == "segments")


async def test_bodies_of_a_run_share_a_file_and_come_back(blobs: FileBlobs, tmp_path: Path) -> None:
    keys = await put(blobs, SOME) + await put(blobs, {f"{RUN}00000/more.1": b"more"})
    assert await read_all(blobs, keys) == [*SOME.values(), b"more"]
    [segment] = files_below(tmp_path)
    assert segment.stat().st_mode & 0o777 == 0o600
    assert all(key.startswith(RUN) for key in keys)
    assert [await blobs.size(key) for key in keys[:3]] == [0, 1, 2]
    assert await read(blobs, keys[3], size=3) == b"333"
    assert await read(blobs, keys[3], size=4) is None


async def test_runs_have_segments_of_their_own(blobs: FileBlobs, tmp_path: Path) -> None:
    other = run_prefix("J", "S", 30)
    first, second = await put(blobs, {f"{RUN}00000/1.1": b"one", f"{other}00000/1.1": b"other"})
    assert len(segment_files(tmp_path)) == 2
    assert await blobs.delete_prefix(RUN) == 1
    assert await read_all(blobs, [first, second]) == [None, b"other"]
    [late] = await put(blobs, {f"{RUN}00000/2.1": b"late"})
    assert await read(blobs, late) == b"late"
    await blobs.delete_prefix("results/")
    assert list(files_below(tmp_path)) == []


async def test_few_bodies_are_stored_without_another_thread(
    blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        began.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    keys = await put(blobs, SOME)
    assert began == []
    keys += await put(blobs, {f"{RUN}00001/{n}.1": bytes(PACKED_MOST) for n in range(5)})
    assert began == ["file-writer"]
    assert {len(body or b"") for body in await read_all(blobs, keys[-5:])} == {PACKED_MOST}


async def test_a_large_body_has_a_file_of_its_own(blobs: FileBlobs, tmp_path: Path) -> None:
    bodies = {f"{RUN}00000/1.1": bytes(PACKED_MOST), f"{RUN}00000/2.1": bytes(PACKED_MOST + 1)}
    small, large = await put(blobs, bodies)
    assert (packed_body(small) is None, packed_body(large) is None) == (False, True)
    assert await read_all(blobs, [small, large]) == list(bodies.values())
    assert (tmp_path / large).stat().st_size == PACKED_MOST + 1


@pytest.mark.parametrize("way", ["a bit", "cut", "gone"])
async def test_a_damaged_body_is_not_served_and_its_neighbours_are(
    blobs: FileBlobs, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = await put(blobs, {f"{RUN}00000/{n}.1": bytes(9) for n in range(3)})
    [segment] = segment_files(tmp_path)
    place = packed_body(third)
    assert place is not None
    with segment.open("r+b") as file:
        if way == "a bit":
            file.seek(place.offset + 4)
            file.write(b"\x01")
        else:
            file.truncate(place.offset + 4 if way == "cut" else 0)
    assert await read(blobs, third, size=9) is None
    assert "a stored body is damaged" in caplog.messages
    assert await blobs.size(third) == (9 if way == "a bit" else None)
    left = None if way == "gone" else bytes(9)
    assert await read_all(blobs, [first, second]) == [left, left]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(flips=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 255)), min_size=1, max_size=3))
def test_whatever_is_flipped_no_other_bytes_are_served(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    async def check() -> None:
        async with opened(tmp_path) as blobs:
            keys = await put(blobs, {key: body for key, body in SOME.items() if len(body) < 10})
            [segment] = segment_files(tmp_path)
            data = bytearray(segment.read_bytes())
            for place, bits in flips:
                data[place % len(data)] ^= bits
            segment.write_bytes(data)
            found = await read_all(blobs, keys)
            assert all(body in (None, SOME[f"{RUN}00000/{n}.1"]) for n, body in enumerate(found))
            await blobs.delete_prefix(RUN)

    anyio.run(check)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 70, 4_096])), max_size=5),
        ),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("delete"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.integers(0, 400)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


class Model:
    """A store beside a table of the bodies that rows would name: steps are made on both."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.blobs = FileBlobs(root)
        self.named: dict[str, tuple[str, bytes]] = {}
        self.number = 0

    async def put(self, sizes: list[tuple[int, int]]) -> None:
        bodies: list[tuple[str, bytes]] = []
        for run, size in sizes:
            self.number += 1
            key = result_key("J", f"R{run}", f"{self.number:013}", 1, 30)
            bodies.append((key, os.urandom(size)))
        for (key, body), found in zip(bodies, await self.blobs.put_new(bodies), strict=True):
            assert isinstance(found, str)
            self.named[found] = (key.rsplit("/", 2)[0] + "/", body)

    async def drop(self, place: int) -> None:
        for key in list(self.named)[place : place + 1]:
            await self.blobs.delete(key)
            await self.blobs.delete(key)  # a second time is nothing new
            del self.named[key]

    async def delete(self, run: int) -> None:
        prefix = run_prefix("J", f"R{run}", 30)
        await self.blobs.delete_prefix(prefix)
        self.named = {key: one for key, one in self.named.items() if one[0] != prefix}
        assert list(files_below(self.root / prefix)) == []

    async def fail(self, room: int) -> None:
        """Put bodies while segments take `room` bytes and no more."""
        write = os.pwrite

        def full(file: int, data: memoryview, place: int) -> int:
            if place >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[: room - place], place)

        with self.monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            await self.put([(0, 70), (1, 70), (0, 1)])

    async def reopen(self, _: None) -> None:
        await self.blobs.aclose()
        self.blobs = FileBlobs(self.root)


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_whatever_is_done_every_named_body_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, object]]
) -> None:
    monkeypatch.setattr(segments, "_MOST_OPEN", 2)

    async def check() -> None:
        model = Model(tmp_path, monkeypatch)
        for name, argument in steps:
            await getattr(model, name)(argument)
            bodies = [body for _, body in model.named.values()]
            assert await read_all(model.blobs, list(model.named)) == bodies
        for run in range(3):
            await model.delete(run)
        await model.blobs.aclose()

    anyio.run(check)


async def test_a_segment_without_a_named_body_is_removed_and_no_other(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    keys = await put(blobs, SOME)
    [kept] = await put(blobs, {f"{RUN}00000/kept.1": b"kept"})
    for key in keys:
        await blobs.delete(key)
        await blobs.delete(key)
    assert await read(blobs, kept) == b"kept"
    await blobs.delete(kept)
    assert list(files_below(tmp_path)) == []
    [again] = await put(blobs, {f"{RUN}00000/again.1": b"again"})
    assert await read(blobs, again) == b"again"


async def test_what_a_segment_does_not_take_goes_into_files(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = await put(blobs, {f"{RUN}00000/before.1": b"before"})
    [segment] = segment_files(tmp_path)
    size, write = segment.stat().st_size, os.pwrite

    def full(file: int, data: memoryview, place: int) -> int:
        if place > size:
            raise OSError(errno.EIO, "Input/output error")
        return write(file, data[:7], place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        keys = await put(blobs, SOME)
    assert keys == list(SOME)
    assert await read_all(blobs, keys) == list(SOME.values())
    assert segment.stat().st_size == size
    [after] = await put(blobs, {f"{RUN}00000/after.1": b"after"})
    assert await read_all(blobs, [before, after]) == [b"before", b"after"]
    assert segment_files(tmp_path) == [segment]


async def test_a_disk_that_writes_less_than_it_was_given_is_given_the_rest(
    blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:7], place))
    assert await read_all(blobs, await put(blobs, SOME)) == list(SOME.values())


async def test_segments_end_and_few_are_open(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENT_BYTES", 100)
    keys = [key for key, body in SOME.items() for key in await put(blobs, {key: body})]
    assert 5 < len(segment_files(tmp_path)) < len(SOME)
    assert await read_all(blobs, keys) == list(SOME.values())
    before = len(os.listdir("/proc/self/fd"))
    runs = [run_prefix("J", f"R{number}", 30) for number in range(100)]
    stored = await put(blobs, {f"{run}00000/1.1": run.encode() for run in runs})
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    assert await read_all(blobs, stored) == [run.encode() for run in runs]
    await blobs.aclose()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
async def test_many_runs_in_turn_have_a_segment_each(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    list_names = os.listdir
    runs = [run_prefix("J", f"R{number}", 30) for number in range(200)]
    stored: dict[str, bytes] = {}

    def noted(path: str) -> list[str]:
        listed.append(path)
        return list_names(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", noted)
        for number in range(50):
            bodies = {f"{run}00000/{number}.1": f"{run}{number}".encode() for run in runs}
            stored |= zip(await put(blobs, bodies), bodies.values(), strict=True)
    assert len(segment_files(tmp_path)) == len(runs)
    assert len(listed) <= len(runs)
    assert await read_all(blobs, list(stored)) == list(stored.values())
    for key in [key for key in stored if key.startswith(runs[0])]:
        await blobs.delete(key)  # of a segment that is closed meanwhile
    assert len(segment_files(tmp_path)) == len(runs) - 1
    [again] = await put(blobs, {f"{runs[0]}00000/again.1": b"again"})
    assert await read(blobs, again) == b"again"


async def test_what_is_known_of_closed_segments_is_bounded(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MOST_OPEN", 2)
    monkeypatch.setattr(segments, "_MOST_CLOSED", 3)
    runs = [run_prefix("J", f"R{number}", 30) for number in range(6)]
    stored: dict[str, bytes] = {}
    for number, run in enumerate(runs + runs[:1] + runs[-3:]):
        body = f"{number}".encode()
        stored |= dict.fromkeys(await put(blobs, {f"{run}00000/{number}.1": body}), body)
    assert len(segment_files(tmp_path)) == len(runs) + 1  # that of the first was forgotten
    assert await read_all(blobs, list(stored)) == list(stored.values())


@pytest.mark.parametrize("way", ["longer", "shorter", "gone"])
async def test_a_closed_segment_that_was_changed_is_not_written_again(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(segments, "_MOST_OPEN", 1)
    [first] = await put(blobs, {f"{RUN}00000/1.1": b"first"})
    [segment] = segment_files(tmp_path)
    await put(blobs, {f"{run_prefix('J', 'S', 30)}00000/1.1": b"other"})
    if way == "gone":
        segment.unlink()
    else:
        data = segment.read_bytes()
        segment.write_bytes(data + b"x" if way == "longer" else data[:-1])
    [second] = await put(blobs, {f"{RUN}00000/2.1": b"second"})
    assert not second.startswith(first[: first.index(".")])
    assert await read_all(blobs, [first, second]) == [
        b"first" if way == "longer" else None,
        b"second",
    ]


async def test_the_segment_of_a_run_that_writes_no_more_is_closed(
    blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_IDLE_APPENDS", 10)
    await put(blobs, {f"{RUN}00000/0.1": b"of a run that ends"})
    [segment] = segment_files(tmp_path)

    def is_open() -> bool:
        return any(_target(link) == segment for link in Path("/proc/self/fd").iterdir())

    assert is_open()
    for number in range(11):
        await put(blobs, {f"{run_prefix('J', 'S', 30)}00000/{number}.1": b"of another"})
    assert not is_open()
    await put(blobs, {f"{RUN}00000/1.1": b"after all"})
    assert segment in segment_files(tmp_path)
    assert len(segment_files(tmp_path)) == 2


async def test_what_is_written_after_a_segment_was_removed_is_kept(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    await put(blobs, SOME)
    [segment] = segment_files(tmp_path)
    segment.unlink()
    keys = await put(blobs, SOME)
    assert await read_all(blobs, keys) == list(SOME.values())


async def test_a_process_writes_to_no_segment_of_the_one_before(tmp_path: Path) -> None:
    keys: list[str] = []
    for _ in range(3):
        async with opened(tmp_path) as blobs:
            keys += await put(blobs, SOME)
    assert len(segment_files(tmp_path)) == 3
    async with opened(tmp_path) as blobs:
        assert await read_all(blobs, keys) == list(SOME.values()) * 3


# -- at the next boot --

CUTS: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda data: data,
    "cut in a body": lambda data: data[:-1],
    "cut in a line": lambda data: data + data.partition(b" ")[0] + b" 7",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_segment_in_which_nothing_was_settled_is_removed_at_boot(
    tmp_path: Path, cut: str, settled: bool
) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    assert first.ports.pipeline is not None
    world = World(first.store, clock)
    job_id, run_id = await world.submit(3)
    tasks = [await world.claimed(run_id, index) for index in range(3)]
    keys = [result_key(job_id, run_id, one.task_id, one.claim_number, 30) for one in tasks]
    stored = await first.ports.pipeline.bodies.put_new([(key, b"a body") for key in keys])
    if settled:
        success = world.success(tasks[0])
        assert isinstance(success, Succeeded)
        assert isinstance(stored[0], str)
        result = StoredBody(stored[0], 6, success.result.content_type, success.result.format)
        await world.settle(tasks[0], Succeeded(success.event, result))
    await first.ports.aclose()
    [segment] = segment_files(tmp_path)
    if cut != "empty" or not settled:
        segment.write_bytes(CUTS[cut](segment.read_bytes()))

    second = await open_binding(tmp_path, clock)
    assert segment.exists() is settled
    if settled:
        row = await second.ports.tasks.get_task(run_id, tasks[0].task_id)
        assert row is not None
        assert row.result is not None
        pieces = await second.ports.blobs.open(row.result.blob_key, size=6)
        assert pieces is not None
        assert [piece async for piece in pieces] == [b"a body"]
    await second.ports.aclose()


async def test_a_segment_with_a_damaged_line_is_kept_at_boot(tmp_path: Path) -> None:
    async with opened(tmp_path) as blobs:
        await put(blobs, SOME)
        [segment] = segment_files(tmp_path)
        for damage in (b"\n", b"\x00"):
            data = segment.read_bytes()
            segment.write_bytes(data[:3] + damage + data[4:])
            await blobs.remove_unsettled(list(SOME))
            assert segment.exists()


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", b"abc", b"of two\nlines"])
async def test_whichever_byte_is_damaged_no_settled_body_is_removed_at_boot(
    tmp_path: Path, body: bytes
) -> None:
    # Ids as they are: a digit away from each other.
    names = [f"{RUN}00000/{number:011}.1" for number in range(1, 5)]
    for settled in range(3):
        unsettled = [key for place, key in enumerate(names) if place != settled]
        async with opened(tmp_path) as blobs:
            await put(blobs, dict.fromkeys(names[:3], body))
            [segment] = segment_files(tmp_path)
            data = segment.read_bytes()
            with segment.open("r+b", buffering=0) as file:
                for place, byte in itertools.product(range(len(data)), b"\n 1239\xff"):
                    os.pwrite(file.fileno(), bytes([byte]), place)
                    remove_unsettled(str(tmp_path), unsettled)
                    assert segment.exists(), (settled, data, place, byte)
                    os.pwrite(file.fileno(), data[place : place + 1], place)
            await blobs.delete_prefix(RUN)


@pytest.mark.parametrize("body", [b"", b"abc", b"of two\nlines"])
async def test_wherever_a_kill_cut_it_off_an_unsettled_segment_is_removed_at_boot(
    tmp_path: Path, body: bytes
) -> None:
    names = [f"{RUN}00000/{number:011}.1" for number in range(1, 4)]
    async with opened(tmp_path) as blobs:
        await put(blobs, dict.fromkeys(names, body))
        [segment] = segment_files(tmp_path)
        data = segment.read_bytes()
        for end in range(len(data) + 1):
            segment.write_bytes(data[:end])
            remove_unsettled(str(tmp_path), names)
            assert not segment.exists(), data[:end]


@pytest.mark.guarantee("G18")
async def test_a_boot_looks_at_the_last_segments_of_a_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENT_BODIES", 1)
    async with opened(tmp_path) as blobs:
        for number in range(60):
            await put(blobs, {f"{RUN}00000/{number}.1": b"a body"})
    read_through: list[str] = []
    holds_only = segments._holds_only

    def noted(path: str, names: set[bytes]) -> bool:
        read_through.append(path)
        return holds_only(path, names)

    monkeypatch.setattr(segments, "_holds_only", noted)
    remove_unsettled(str(tmp_path), [f"{RUN}00000/{number}.1" for number in (40, 56, 58, 59)])
    left = [int(path.name) for path in segment_files(tmp_path)]
    assert left == [*range(1, 57), 58]
    assert len(read_through) <= 10


WRITES = """
import asyncio, sys
from pathlib import Path
from conveyor.dev.files import FileBlobs

async def main():
    blobs, number = FileBlobs(Path(sys.argv[1])), 0
    while True:
        bodies = []
        for _ in range(50):
            number += 1
            bodies.append((f"results/30/J/R/00000/{number}.1", b"%d." % number * 700))
        print(*await blobs.put_new(bodies), sep="\\n", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.guarantee("G11")
def test_a_kill_while_bodies_are_written_loses_none_that_was_stored(tmp_path: Path) -> None:
    keys: list[str] = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(200)]
            process.kill()
            said += process.stdout.read().splitlines(keepends=True)
        keys += [line.rstrip() for line in said if line.endswith("\n")]

    async def check() -> None:
        async with opened(tmp_path) as blobs:
            for body in await read_all(blobs, keys[:100] + keys[-200:]):
                assert body is not None
                number, _, _ = body.partition(b".")
                assert body == b"%s." % number * 700
            await blobs.remove_unsettled([f"{RUN}00000/{number}.1" for number in range(1, 10**5)])

    anyio.run(check)
    assert segment_files(tmp_path) == []


# -- behind the API --


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as api:
        yield api


async def test_rows_of_packed_bodies_are_served_and_exported_and_a_damaged_one_is_not(
    api: Api,
) -> None:
    bench = await bench_over(api, 3)
    await bench.handler.settle(await bench.answered())
    assert len(body_files(api.directory)) == 3
    job_id = bench.deliveries[0].message.job_id
    path = f"/v1/jobs/{job_id}"
    tasks = await api.tasks_of(bench.run_id)
    places = []
    for task in tasks:
        assert task.result is not None
        places.append(packed_body(task.result.blob_key))
        content = f"{path}/tasks/{task.task_id}/content"
        answer = await api.client.get(content)
        assert (answer.status_code, answer.content) == (200, b"body")
        head = await api.client.head(content)
        assert (head.headers["Content-Length"], head.content) == ("4", b"")
    assert None not in places
    job = (await api.client.get(path)).json()
    with zipfile.ZipFile(io.BytesIO((await made(api, job)).content)) as archive:
        assert [archive.read(row["file"]) for row in manifest(archive)] == [b"body"] * 3

    [segment] = segment_files(api.directory)
    place = places[1]
    assert place is not None
    with segment.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"bode")
    answers = [await api.client.get(f"{path}/tasks/{one.task_id}/content") for one in tasks]
    assert [answer.status_code for answer in answers] == [200, 410, 200]
    problem_of(answers[1], status=410, code="result_expired")


async def test_a_settlement_that_did_not_apply_leaves_dead_bytes_or_no_file(api: Api) -> None:
    bench = await bench_over(api, 2)
    first, second = await bench.answered()
    task = (await api.tasks_of(bench.run_id))[1]
    await api.clock.advance(61.0)
    await api.claim(bench.run_id, task.task_id)  # the claim of the second has lapsed
    await bench.handler.settle([first, second])
    assert (await api.tasks_of(bench.run_id))[0].status == "successful"
    assert len(segment_files(api.directory)) == 1


async def test_an_inherited_row_names_the_packed_body_of_its_source(api: Api) -> None:
    bench = await bench_over(api, 3)
    first, second, third = await bench.answered()
    await bench.handler.settle([first, second])
    await bench.handler.undo([third])
    source = await api.tasks_of(bench.run_id)
    await api.fail(bench.run_id, source[2].task_id)
    path = f"/v1/jobs/{bench.deliveries[0].message.job_id}"
    rerun = await api.client.post(f"{path}/rerun", params={"status": "failed"})
    assert rerun.status_code == 201, rerun.text
    inherited = await api.tasks_of(rerun.json()["latest_run"]["run_id"])
    assert [task.source_run_id for task in inherited] == [bench.run_id, bench.run_id, None]
    for task, origin in zip(inherited[:2], source[:2], strict=True):
        assert task.result is not None
        assert task.result == origin.result
        assert packed_body(task.result.blob_key) is not None
        answer = await api.client.get(f"{path}/tasks/{task.task_id}/content")
        assert (answer.status_code, answer.content) == (200, b"body")


def _target(link: Path) -> Path | None:
    """The file that a descriptor is of; None if another thread has closed it."""
    try:
        return link.readlink()
    except OSError:
        return None
