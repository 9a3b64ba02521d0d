"""One piece of work over a server of its own: its outcome, and what is left of it."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.roles.run import INTERRUPTED, OWN_ROWS, PREFIX, run_once
from conveyor.settings import Settings, load
from tests.patient import SECONDS

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Restore the collector of the process."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def settings(**values: Any) -> Settings:
    return load({}, port=0, gateway="fake", log_level="error", **values)


class Asking:
    """Work that asks the server whether it is ready, and looks at what is on the disk."""

    def __init__(self, beside: Path) -> None:
        self.beside = beside
        self.salvaged = 0
        self.seen: list[Path] = []

    async def drain(self, api: str) -> int:
        async with httpx.AsyncClient(timeout=SECONDS) as client:
            ready = await client.get(api.removesuffix("/v1") + "/readyz")
        self.seen = list(self.beside.iterdir())
        return ready.status_code

    async def salvage(self, api: str) -> None:
        self.salvaged += 1


def test_the_work_meets_a_server_and_nothing_is_left(tmp_path: Path) -> None:
    work = Asking(tmp_path)
    before = os.umask(0o022)
    try:
        assert run_once(settings(), work, data_dir=None, beside=tmp_path) == 200
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    (made,) = work.seen
    assert made.name.startswith(PREFIX)
    assert list(tmp_path.iterdir()) == []
    assert work.salvaged == 0


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed, alive, young = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "alive", "young"))
    for directory in (killed, alive, young):
        (directory / "blobs").mkdir(parents=True)
    for directory in (killed, alive):
        (directory / "lock").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    work = Asking(tmp_path)
    with (alive / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_once(settings(), work, data_dir=None, beside=tmp_path) == 200
    assert not killed.exists()
    assert alive.exists()
    assert young.exists()
    assert (elsewhere / "lock").exists()


def test_a_data_directory_is_kept_and_its_owners_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    work = Asking(tmp_path)
    assert run_once(settings(), work, data_dir=kept, beside=tmp_path) == 200
    assert work.seen == [kept]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept.iterdir()}
    assert "conveyor.db" in modes
    assert not any(modes.values())


class Failing(Asking):
    """Work that cannot be done."""

    async def drain(self, api: str) -> int:
        raise ZeroDivisionError(api)


def test_what_the_work_raises_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="/v1$"):
        run_once(settings(), Failing(tmp_path), data_dir=None, beside=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Interrupted(Asking):
    """Work that a signal meets, and maybe another what is made of it."""

    def __init__(self, beside: Path, *, again: bool) -> None:
        super().__init__(beside)
        self._again = again

    async def drain(self, api: str) -> int:
        await super().drain(api)
        signal.raise_signal(signal.SIGTERM)
        await anyio.sleep_forever()
        raise AssertionError("the signal ends the sleep")

    async def salvage(self, api: str) -> None:
        if self._again:
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep_forever()
        await self.drain_again(api)
        self.salvaged += 1

    async def drain_again(self, api: str) -> None:
        assert await Asking.drain(self, api) == 200


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_ends_the_work_and_a_second_one_what_comes_of_it(
    tmp_path: Path, again: bool
) -> None:
    work = Interrupted(tmp_path, again=again)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert run_once(settings(), work, data_dir=None, beside=tmp_path) == INTERRUPTED
    assert work.salvaged == (0 if again else 1)
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_server_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(ExceptionGroup) as caught:
        run_once(settings(), Asking(tmp_path), data_dir=taken, beside=tmp_path)
    assert caught.group_contains(ConveyorError)
    with pytest.raises(ConveyorError, match="cannot make a directory in"):
        run_once(settings(), Asking(tmp_path), data_dir=None, beside=taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_the_limits_of_a_server_are_wider_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []

    async def stand_in(chosen: Settings, _work: object) -> int:
        seen.append(chosen)
        return 0

    monkeypatch.setattr("conveyor.roles.run._run", stand_in)
    run_once(settings(max_input_rows=5), Asking(tmp_path), data_dir=tmp_path, beside=tmp_path)
    run_once(
        settings(max_input_rows=2 * OWN_ROWS), Asking(tmp_path), data_dir=tmp_path, beside=tmp_path
    )
    assert [chosen.max_input_rows for chosen in seen] == [OWN_ROWS, 2 * OWN_ROWS]
