"""Copies of a data directory without its server: every body comes back, and the database."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from conveyor.dev.copies import load_copy, save_copy
from conveyor.dev.directory import LOADING, DataDirectory
from conveyor.dev.sqlite import open_store
from conveyor.domain.errors import ConveyorError
from conveyor.records.blob_keys import result_key
from conveyor.testing.clock import FakeClock
from tests.disk import files_below


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def source(tmp_path: Path, anyio_backend: str) -> Path:
    """A directory with bodies, one of which is half written."""
    directory = DataDirectory.open(tmp_path / "data", FakeClock(), secret="")
    store = await open_store(directory.database, now=0)
    await store.aclose()
    directory.close()
    keys = [result_key("JOB", "RUN", f"{number:07}ABCDEF", 1, 30) for number in range(3)]
    for number, key in enumerate([*keys, "tmp/half"]):
        body = directory.blobs / key
        body.parent.mkdir(parents=True, exist_ok=True)
        body.write_bytes(bytes([number]) * (number * 1_000))
    return directory.path


def contents(directory: Path) -> dict[str, bytes]:
    """Read what a copy is to have."""
    left_out = ("lock", "blobs/tmp/half")
    found = {str(path.relative_to(directory)): path for path in files_below(directory)}
    return {name: path.read_bytes() for name, path in found.items() if name not in left_out}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_has_every_body_and_fills_a_directory_with_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "a file system without links")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    before = contents(source)
    saved = save_copy(source, tmp_path / "copy.tar", FakeClock())
    load_copy(tmp_path / "copy.tar", tmp_path / "into")

    assert saved.has_secret
    assert saved.size == (tmp_path / "copy.tar").stat().st_size
    assert sum(name.startswith("blobs/") for name in before) == 3
    after = contents(tmp_path / "into")
    assert after.keys() == before.keys()
    assert {name: after[name] for name in before if name != "conveyor.db"} == {
        name: body for name, body in before.items() if name != "conveyor.db"
    }
    assert contents(source) == before, "nothing is left aside"


def test_a_directory_that_a_killed_load_left_is_filled_again(source: Path, tmp_path: Path) -> None:
    save_copy(source, tmp_path / "copy.tar", FakeClock())
    load_copy(tmp_path / "copy.tar", tmp_path / "into")
    (tmp_path / "into" / LOADING).touch()
    load_copy(tmp_path / "copy.tar", tmp_path / "into")
    assert contents(tmp_path / "into").keys() == contents(source).keys()


@pytest.mark.parametrize("left", ["conveyor.db", "blobs", "notes.txt"])
def test_a_directory_with_anything_in_it_is_not_filled(
    source: Path, tmp_path: Path, left: str
) -> None:
    save_copy(source, tmp_path / "copy.tar", FakeClock())
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / left).write_text("somebody's")
    with pytest.raises(ConveyorError, match="not empty"):
        load_copy(tmp_path / "copy.tar", tmp_path / "into")
    assert (tmp_path / "into" / left).read_text() == "somebody's"
