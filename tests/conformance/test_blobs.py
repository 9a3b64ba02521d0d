"""The contract of every blobs adapter, sentence by sentence of the port; then the additions of
files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from conveyor.clock import SystemClock
from conveyor.dev import files
from conveyor.dev.files import PIECE, FileBlobs
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import Blobs, Content
from conveyor.prod.s3.blobs import PART, S3Blobs
from conveyor.records.blob_keys import result_key, run_prefix
from conveyor.records.packed_bodies import pack_key, place_body
from tests.conformance.s3_bucket import empty_bucket, unfinished_uploads
from tests.disk import files_below

PREFIX = run_prefix("JOB", "RUN", 30)
KEY = result_key("JOB", "RUN", "0000003ABCDEF", 1, 30)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Bench:
    """An adapter under test. `leftovers` lists what lies in the store beside whole bodies."""

    blobs: Blobs
    leftovers: Callable[[], Awaitable[list[str]]]

    async def read(self, key: str) -> bytes | None:
        content = await self.blobs.open(key)
        return None if content is None else b"".join([piece async for piece in content])


@asynccontextmanager
async def _files(root: Path) -> AsyncIterator[Bench]:
    async def leftovers() -> list[str]:
        return os.listdir(root / "tmp")

    blobs = FileBlobs(root)
    yield Bench(blobs, leftovers)
    await blobs.aclose()


@asynccontextmanager
async def _objects(_: Path) -> AsyncIterator[Bench]:
    async with empty_bucket() as (aws, bucket):
        blobs = S3Blobs(aws, bucket=bucket, clock=SystemClock())
        yield Bench(blobs, partial(unfinished_uploads, aws, bucket))


BINDINGS = {"files": _files, "objects": _objects}


@pytest.fixture(params=BINDINGS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with BINDINGS[request.param](tmp_path / "blobs") as bench:
        yield bench


async def _pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def _body(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


SIZES = [0, 1, 4_096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7, PART + 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["whole", "in pieces", "in one piece"])
async def test_a_body_comes_back_byte_for_byte(bench: Bench, size: int, form: str) -> None:
    body = _body(size)
    contents: dict[str, Content] = {
        "whole": body,
        "in pieces": _pieces(body, 10_007),
        "in one piece": _pieces(body, max(size, 1)),
    }
    assert await bench.blobs.put(KEY, contents[form]) == size
    assert await bench.read(KEY) == body
    assert await bench.leftovers() == []


async def test_an_empty_iterator_is_an_empty_body(bench: Bench) -> None:
    assert await bench.blobs.put(KEY, _pieces(b"", 1)) == 0
    assert await bench.read(KEY) == b""


@pytest.mark.parametrize("size", SIZES)
async def test_pieces_are_bounded(bench: Bench, size: int) -> None:
    await bench.blobs.put(KEY, _body(size))
    content = await bench.blobs.open(KEY)
    assert content is not None
    sizes = [len(piece) async for piece in content]
    assert sum(sizes) == size
    assert all(0 < length <= PIECE for length in sizes)


async def test_where_there_is_no_body_there_is_none(bench: Bench) -> None:
    await bench.blobs.put("results/30/a", b"x")
    for key in (KEY, "results/30", "results/30/a/b"):
        assert await bench.blobs.open(key) is None
        assert await bench.blobs.size(key) is None


@pytest.mark.parametrize("size", SIZES)
async def test_a_body_tells_its_size(bench: Bench, size: int) -> None:
    await bench.blobs.put(KEY, b"of an earlier one")
    await bench.blobs.put(KEY, _body(size))
    assert await bench.blobs.size(KEY) == size
    await bench.blobs.delete(KEY)
    assert await bench.blobs.size(KEY) is None


@pytest.mark.parametrize("lost", [1, PIECE, 2 * PIECE])
async def test_a_body_that_lost_bytes_is_no_body(bench: Bench, lost: int) -> None:
    size = 2 * PIECE
    await bench.blobs.put(KEY, _body(size - lost))
    assert await bench.blobs.open(KEY, size=size) is None
    content = await bench.blobs.open(KEY, size=size - lost)
    assert content is not None
    assert sum([len(piece) async for piece in content]) == size - lost
    assert await bench.blobs.open(f"{KEY}.not", size=size) is None


class Broken(Exception):
    pass


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("after", [0, 10, PIECE + 10, PART + 10, 2 * PART + 10])
@pytest.mark.parametrize("error", [Broken(), OSError(errno.ECONNRESET, "reset")])
async def test_what_the_iterator_raises_is_raised_again_and_nothing_is_stored(
    bench: Bench, after: int, error: Exception
) -> None:
    async def content() -> AsyncIterator[bytes]:
        async for piece in _pieces(_body(after), 100_000):
            yield piece
        raise error

    with pytest.raises(type(error)) as caught:
        await bench.blobs.put(KEY, content())
    assert caught.value is error
    assert await bench.read(KEY) is None
    assert await bench.leftovers() == []


@pytest.mark.parametrize("after", [10, PIECE + 10, PART + 10, 2 * PART + 10])
async def test_a_cancelled_put_stores_nothing_and_leaves_nothing(bench: Bench, after: int) -> None:
    waiting = anyio.Event()

    async def content() -> AsyncIterator[bytes]:
        yield _body(after)
        waiting.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(bench.blobs.put, KEY, content())
        await waiting.wait()
        assert await bench.read(KEY) is None
        group.cancel_scope.cancel()
    assert await bench.read(KEY) is None
    assert await bench.leftovers() == []


@pytest.mark.parametrize("size", [10, PIECE + 10, PART + 10])
async def test_readers_see_the_old_body_or_the_new_one(bench: Bench, size: int) -> None:
    old, new = b"o" * size, b"n" * (size + 1)
    await bench.blobs.put(KEY, old)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.blobs.put, KEY, new)
        for _ in range(50 if size < PART else 5):
            assert await bench.read(KEY) in (old, new)
    assert await bench.read(KEY) == new


async def test_many_puts_at_once_all_arrive(bench: Bench) -> None:
    keys = [result_key("JOB", "RUN", f"{number:026}", 1, 30) for number in range(500)]
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.blobs.put, key, key.encode())
    for key in keys:
        assert await bench.read(key) == key.encode()


async def test_a_deleted_body_is_gone_and_its_neighbours_are_not(bench: Bench) -> None:
    await bench.blobs.put(PREFIX + "a", b"a")
    await bench.blobs.put(PREFIX + "b", b"b")
    await bench.blobs.delete(PREFIX + "a")
    await bench.blobs.delete(PREFIX + "a")
    await bench.blobs.delete("never/was/here")
    assert await bench.read(PREFIX + "a") is None
    assert await bench.read(PREFIX + "b") == b"b"


async def _put_all(bench: Bench, keys: Sequence[str]) -> None:
    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(bench.blobs.put, key, b"x")


@pytest.mark.guarantee("G10")
async def test_a_prefix_is_removed_whole_and_counted(bench: Bench) -> None:
    keys = [result_key("JOB", "RUN", f"{number:07}ABC", 1, 30) for number in range(600)]
    await _put_all(bench, keys)
    other = result_key("JOB", "RUNNER", "0000001ABC", 1, 30)
    await bench.blobs.put(other, b"mine")
    assert await bench.blobs.delete_prefix(PREFIX) == 600
    assert await bench.blobs.delete_prefix(PREFIX) == 0
    assert await bench.read(result_key("JOB", "RUN", f"{7:07}ABC", 1, 30)) is None
    assert await bench.read(other) == b"mine"


async def test_a_prefix_is_removed_in_portions_of_a_bounded_size(bench: Bench) -> None:
    keys = [result_key("JOB", "RUN", f"{number:07}ABC", 1, 30) for number in range(0, 6_000, 10)]
    await _put_all(bench, keys)
    went = [await bench.blobs.delete_prefix(PREFIX, limit=290) for _ in range(4)]
    assert went == [290, 290, 20, 0]
    assert [key for key in keys[::20] if await bench.read(key) is not None] == []


async def test_no_more_bodies_of_a_prefix_are_removed_than_asked(bench: Bench) -> None:
    keys = [result_key("JOB", "RUN", f"{number:07}ABC", 1, 30) for number in range(5)]
    await _put_all(bench, keys)
    assert await bench.blobs.delete_prefix(PREFIX, limit=3) == 3
    assert sum([await bench.read(key) is not None for key in keys]) == 2
    assert await bench.blobs.delete_prefix(PREFIX, limit=3) == 2


async def test_keys_are_listed_in_order_page_by_page(bench: Bench) -> None:
    wanted = [f"templates/JOB{number % 7}/LIST/{number:011}" for number in range(60)]
    await _put_all(bench, [*wanted, KEY, "templatesque/JOB/LIST/1"])
    found: list[str] = []
    while page := await bench.blobs.list_keys(
        "templates/", after=found[-1] if found else "", limit=25
    ):
        assert len(page) == min(25, 60 - len(found))
        found += page
    assert found == sorted(wanted)
    below = await bench.blobs.list_keys("templates/JOB3/", after="", limit=100)
    assert below == [key for key in found if key.startswith("templates/JOB3/")]
    assert await bench.blobs.list_keys("templates/NONE/", after="", limit=1) == []


async def test_more_keys_than_one_call_lists_are_listed(bench: Bench) -> None:
    keys = sorted(result_key("JOB", "RUN", f"{number:07}ABC", 1, 30) for number in range(1_005))
    await _put_all(bench, keys)
    assert await bench.blobs.list_keys(PREFIX, after="", limit=2_000) == keys
    assert await bench.blobs.list_keys(PREFIX, after=keys[2], limit=1_001) == keys[3:1_004]


async def test_a_removed_prefix_can_be_written_again(bench: Bench) -> None:
    for body in (b"one", b"two", _body(PIECE + 5)):
        await bench.blobs.put(KEY, body)
        assert await bench.read(KEY) == body
        assert await bench.blobs.delete_prefix(PREFIX) == 1


@pytest.mark.parametrize("size", [10, PIECE + 10])
async def test_writers_beside_a_removal_store_whole_bodies_or_fail_cleanly(
    bench: Bench, size: int
) -> None:
    stored: list[str] = []
    body = _body(size)

    async def write(number: int) -> None:
        key = f"{PREFIX}{number % 3}/{number}"
        with contextlib.suppress(ConveyorError):
            await bench.blobs.put(key, body)
            stored.append(key)

    async with anyio.create_task_group() as group:
        for number in range(60):
            group.start_soon(write, number)
        for _ in range(20):
            await bench.blobs.delete_prefix(PREFIX)
    for key in stored:
        assert await bench.read(key) in (None, body)
    await bench.blobs.delete_prefix(PREFIX)
    assert [key for key in stored if await bench.read(key) is not None] == []
    assert await bench.leftovers() == []


# -- packed bodies --


async def _packed(bench: Bench, bodies: Sequence[bytes]) -> list[str]:
    """Store a pack of bodies; return the key of each."""
    pack, offset, keys = pack_key(KEY), 0, []
    for body in bodies:
        keys.append(place_body(pack, offset, body).key)
        offset += len(body)
    await bench.blobs.put(pack, b"".join(bodies))
    return keys


PACKED = [b"one", _body(PIECE + 1), b"three", _body(1024 * 1024)]


@pytest.mark.guarantee("G11")
async def test_a_packed_body_comes_back_byte_for_byte(bench: Bench) -> None:
    keys = await _packed(bench, PACKED)
    for key, body in zip(keys, PACKED, strict=True):
        content = await bench.blobs.open(key, size=len(body))
        assert content is not None
        pieces = [piece async for piece in content]
        assert b"".join(pieces) == body
        assert all(0 < len(piece) <= PIECE for piece in pieces)
        assert await bench.blobs.size(key) == len(body)
        assert await bench.blobs.open(key, size=len(body) + 1) is None
    assert await bench.blobs.read_neighbours(keys[::-1]) == PACKED[::-1]
    assert await bench.blobs.read_neighbours(keys[1:3]) == PACKED[1:3]
    assert await bench.blobs.download_link(keys[0], seconds=600, file_name="one") is None


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("way", ["a bit", "cut", "gone"])
async def test_a_packed_body_that_is_damaged_is_no_body_and_its_neighbours_are(
    bench: Bench, way: str
) -> None:
    first, second, third = keys = await _packed(bench, [b"one", b"two", b"three"])
    left = {"a bit": b"onetwothreE", "cut": b"onetwothr", "gone": None}[way]
    if left is None:
        await bench.blobs.delete(pack_key(KEY))
    else:
        await bench.blobs.put(pack_key(KEY), left)
    assert await bench.blobs.open(third) is None
    assert await bench.blobs.size(third) == (5 if way == "a bit" else None)
    whole = [None, None] if left is None else [b"one", b"two"]
    assert [await bench.read(first), await bench.read(second)] == whole
    assert await bench.blobs.read_neighbours(keys) == [*whole, None]


@pytest.mark.guarantee("G10")
async def test_a_packed_body_goes_with_its_run_and_not_before(bench: Bench) -> None:
    first, second = await _packed(bench, [b"one", b"two"])
    await bench.blobs.delete(first)
    assert await bench.read(second) == b"two"
    assert await bench.blobs.delete_prefix(PREFIX) == 1
    assert await bench.read(second) is None


async def test_only_packed_bodies_have_neighbours(bench: Bench) -> None:
    await bench.blobs.put(KEY, b"x")
    with pytest.raises(ValueError, match="not the key of a packed body"):
        await bench.blobs.read_neighbours([KEY])


BAD_KEYS = [
    "",
    "/etc/passwd",
    "a//b",
    "a/",
    "../a",
    "a/../b",
    "a/./b",
    ".",
    "a b",
    "a\n",
    "é",
    "a\0",
]


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_what_is_not_a_key_is_refused(bench: Bench, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        await bench.blobs.put(key, b"x")
    with pytest.raises(ValueError, match="key"):
        await bench.blobs.open(key)
    with pytest.raises(ValueError, match="key"):
        await bench.blobs.delete(key)
    with pytest.raises(ValueError, match="key"):
        await bench.blobs.size(key)


@pytest.mark.parametrize("prefix", ["", "/", "a", "../", "a/../", "tmp/"])
async def test_what_is_not_a_prefix_is_refused(bench: Bench, prefix: str) -> None:
    with pytest.raises(ValueError, match=r"key|prefix"):
        await bench.blobs.delete_prefix(prefix)


def _directories(root: Path) -> list[str]:
    return sorted(os.path.relpath(directory, root) for directory, _, _ in os.walk(root))


async def test_files_lie_under_their_keys_for_the_owner_alone(tmp_path: Path) -> None:
    async with _files(tmp_path) as bench:
        for size in (3, PIECE + 3):
            await bench.blobs.put(KEY, _body(size))
            path = tmp_path / KEY
            assert path.read_bytes() == _body(size)
            assert path.stat().st_mode & 0o077 == 0


async def test_a_removed_prefix_leaves_no_empty_directory(tmp_path: Path) -> None:
    async with _files(tmp_path) as bench:
        await bench.blobs.put(KEY, b"x")
        await bench.blobs.put(run_prefix("JOB", "SECOND", 30) + "a", b"x")
        await bench.blobs.delete_prefix(PREFIX)
        assert not (tmp_path / PREFIX).exists()
        assert (tmp_path / "results/30/JOB").exists()
        await bench.blobs.delete_prefix(run_prefix("JOB", "SECOND", 30))
        assert _directories(tmp_path) == [".", "tmp"]


async def test_what_an_earlier_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "1").write_bytes(b"half")
    async with _files(tmp_path) as bench:
        assert await bench.leftovers() == []
        await bench.blobs.put(KEY, b"x")
        assert await bench.read(KEY) == b"x"


async def test_closing_writes_what_is_queued_and_refuses_what_comes_later(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(blobs.put, f"a/{number}", b"x")
        await anyio.lowlevel.checkpoint()
        await blobs.aclose()
    assert len(list((tmp_path / "a").iterdir())) == 100
    with pytest.raises(ConveyorError):
        await blobs.put("a/late", b"x")
    await blobs.aclose()


@pytest.mark.parametrize("size", [10, PIECE + 10])
async def test_a_disk_that_fails_is_reported_without_a_path(tmp_path: Path, size: int) -> None:
    async with _files(tmp_path) as bench:
        await bench.blobs.put("taken", b"x")
        with pytest.raises(ConveyorError) as caught:
            await bench.blobs.put("taken/below", _body(size))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert str(tmp_path) not in str(caught.value)
        assert await bench.leftovers() == []
        await bench.blobs.put("fine", _body(size))


@pytest.mark.parametrize("size", [10, PIECE + 10])
async def test_a_full_disk_leaves_nothing_and_recovers(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: str, _target: str, _root: str) -> None:
        os.unlink(temporary)
        raise OSError(errno.ENOSPC, "No space left on device", temporary)

    async with _files(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(files, "move_into_place", full)
            patch.setattr(files, "_free", lambda _directory: 0)
            with pytest.raises(ConveyorError, match="No space left on device") as caught:
                await bench.blobs.put(KEY, _body(size))
        assert str(tmp_path) not in str(caught.value)
        assert await bench.leftovers() == []
        await bench.blobs.put(KEY, _body(size))
        assert await bench.read(KEY) == _body(size)


def _can_mount() -> bool:
    unshare = shutil.which("unshare")
    command = [str(unshare), "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return unshare is not None and not subprocess.run(command, check=False).returncode


def _on_a_small_disk(directory: Path, program: str) -> str:
    """Return what a program wrote whose argument is a directory with a small disk of its own."""
    if not _can_mount():
        pytest.skip("needs a small disk of its own")
    limited = [
        "unshare", "-rm", "sh", "-c",
        'mount -t tmpfs -o size=6m tmpfs "$1" && shift && exec "$@"', "sh", str(directory),
        sys.executable, "-m", f"tests.conformance.{program}", str(directory),
    ]  # fmt: skip
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_on_a_full_disk_says_so_at_its_opening(tmp_path: Path) -> None:
    assert _on_a_small_disk(tmp_path, "full_disk") == "the disk is full"


async def test_whatever_lies_among_the_temporaries_goes_at_the_start(tmp_path: Path) -> None:
    temporaries, kept = tmp_path / "blobs" / "tmp", tmp_path / "kept"
    (temporaries / "1" / "2").mkdir(parents=True)
    (temporaries / "1" / "2" / "file").write_bytes(b"x")
    (temporaries / "3").write_bytes(b"x")
    kept.mkdir()
    (temporaries / "4").symlink_to(kept, target_is_directory=True)
    blobs = FileBlobs(tmp_path / "blobs")
    assert os.listdir(temporaries) == []
    assert kept.is_dir()
    await blobs.aclose()


def test_a_body_too_large_for_its_disk_is_refused_and_a_full_disk_is_away(tmp_path: Path) -> None:
    assert json.loads(_on_a_small_disk(tmp_path, "small_disk")) == {
        "small": "kept",
        "large": "NoRoom",
        "small beside it": "kept",
        "large piece by piece": "NoRoom",
        "many at once": ["kept", "NoRoom"],
        "usual ones at once": False,
        "full": "ConveyorError",
        "large while full": "ConveyorError",
        "packed until full": ["ConveyorError"],
        "packed again": ["ConveyorError"],
        "leftovers": [],
    }


async def _put_both_ways(bench: Bench, body: bytes) -> list[str | Exception]:
    """Put a body aside and in place; return the key of each, or what came in the way."""
    found: list[str | Exception] = ["results/aside"]
    try:
        await bench.blobs.put("results/aside", body)
    except ConveyorError as error:
        found = [error]
    assert isinstance(bench.blobs, FileBlobs)
    return found + await bench.blobs.put_new([("results/in-place", body)])


BOTH = ["results/aside", "results/in-place"]


async def test_a_disk_that_writes_less_than_it_was_given_is_given_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, body = os.write, _body(1_000)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    async with _files(tmp_path) as bench:
        assert await _put_both_ways(bench, body) == BOTH
        assert [await bench.read(key) for key in BOTH] == [body] * 2


async def test_a_body_that_the_disk_takes_in_part_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: bytes | memoryview) -> int:
        """Take the first part of each body, and no more."""
        if isinstance(data, memoryview):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:500])

    before = len(os.listdir("/proc/self/fd"))
    async with _files(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            errors = await _put_both_ways(bench, _body(1_000))
        assert all("No space left on device" in str(error) for error in errors)
        assert list(files_below(tmp_path)) == []
        assert await _put_both_ways(bench, _body(1_000)) == BOTH
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_body_that_is_being_read_outlives_its_deletion_and_is_closed_when_dropped(
    tmp_path: Path,
) -> None:
    async with _files(tmp_path) as bench:
        before = len(os.listdir("/proc/self/fd"))
        await bench.blobs.put(KEY, _body(3 * PIECE))
        read, dropped = await bench.blobs.open(KEY), await bench.blobs.open(KEY)
        assert read is not None
        assert dropped is not None
        await bench.blobs.delete(KEY)
        assert b"".join([piece async for piece in read]) == _body(3 * PIECE)
        await anext(dropped)
        del dropped
        assert len(os.listdir("/proc/self/fd")) <= before


async def test_small_bodies_share_one_thread_and_are_taken_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    report = files.FileWriter._report

    def count(batch: list[files._Job]) -> None:
        batches.append(len(batch))
        report(batch)

    monkeypatch.setattr(files.FileWriter, "_report", staticmethod(count))
    async with _files(tmp_path) as bench, anyio.create_task_group() as group:
        for number in range(1_000):
            group.start_soon(bench.blobs.put, f"a/{number}", _pieces(b"x" * 4_096, 1_000))
    assert sum(batches) == 1_000
    assert len(batches) < 500
