"""The data directory: one owner, one secret, nothing that others can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conveyor.dev.directory import (
    CONTENTS,
    LEAST_FREE,
    LOADING,
    SECRET_BYTES,
    DataDirectory,
    directory_problem,
    disk_problem,
    kept_secret,
)
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.testing.clock import FakeClock


def _open(path: Path, *, secret: str = "", seed: int = 0) -> DataDirectory:
    return DataDirectory.open(path, FakeClock(seed=seed), secret=secret)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_missing_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = _open(tmp_path / "deep" / "data")
    assert _mode(directory.path) == 0o700
    assert _mode(directory.path / "secret") == 0o600
    assert directory.database == directory.path / "conveyor.db"
    assert directory.blobs == directory.path / "blobs"
    directory.close()


def test_the_secret_stays_the_same(tmp_path: Path) -> None:
    first = _open(tmp_path, seed=1)
    first.close()
    second = _open(tmp_path, seed=2)
    second.close()
    assert first.secret == second.secret
    assert len(first.secret) == SECRET_BYTES
    assert (tmp_path / "secret").read_text().strip() == first.secret.hex()


def test_a_given_secret_is_used_and_not_stored(tmp_path: Path) -> None:
    directory = _open(tmp_path, secret="correct horse")
    assert directory.secret == b"correct horse"
    assert not (tmp_path / "secret").exists()
    directory.close()


def test_the_text_of_a_secret_file_given_as_setting_means_the_same(tmp_path: Path) -> None:
    stored = _open(tmp_path / "one")
    text = (tmp_path / "one" / "secret").read_text().strip()
    given = _open(tmp_path / "two", secret=text)
    assert given.secret == stored.secret
    stored.close()
    given.close()


def test_a_secret_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    _open(tmp_path).close()
    (tmp_path / "secret").chmod(0o644)
    _open(tmp_path).close()
    assert _mode(tmp_path / "secret") == 0o600


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "é" * 64])
def test_a_damaged_secret_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ConveyorError, match="secret is damaged") as caught:
        _open(tmp_path)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert (tmp_path / "secret").read_text() == text
    _reopens_after_repair(tmp_path)


def _reopens_after_repair(path: Path) -> None:
    (path / "secret").unlink()
    _open(path).close()


def test_a_secret_half_made_by_a_process_that_died_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "secret.new").write_text("abc")
    directory = _open(tmp_path)
    assert sorted(_contents(tmp_path)) == ["lock", "secret"]
    directory.close()


def test_a_second_owner_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = _open(tmp_path)
    before = _contents(tmp_path)
    with pytest.raises(ConveyorError) as caught:
        _open(tmp_path, secret="other")
    assert caught.value.code is ErrorCode.CONFLICT
    in_use = f"{tmp_path} is in use by another conveyor-dev (pid {os.getpid()})"
    assert caught.value.detail == directory_problem(tmp_path) == in_use
    assert _contents(tmp_path) == before
    first.close()
    first.close()
    assert directory_problem(tmp_path) is None
    _open(tmp_path).close()


def test_a_dead_owner_does_not_keep_the_directory(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; "
        "from conveyor.clock import SystemClock; "
        "from conveyor.dev.directory import DataDirectory; "
        "DataDirectory.open(Path(sys.argv[1]), SystemClock()); os.kill(os.getpid(), 9)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert process.returncode == -9
    assert len((tmp_path / "secret").read_text().strip()) == 2 * SECRET_BYTES
    _open(tmp_path).close()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_path_that_cannot_be_a_directory_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConveyorError) as caught:
        _open(tmp_path / name)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "not a directory" in caught.value.detail
    assert "\n" not in caught.value.detail
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        ConveyorError, match="cannot use .* as data directory: its lock is a directory"
    ):
        _open(tmp_path)


def test_a_directory_shows_no_secret_when_printed(tmp_path: Path) -> None:
    directory = _open(tmp_path)
    assert directory.secret.hex() not in repr(directory)
    assert repr(directory.secret) not in repr(directory)
    directory.close()


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o710])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_directory_that_others_can_enter_is_closed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, used_before: bool
) -> None:
    data = tmp_path / "data"
    if used_before:
        _open(data).close()
        for name in CONTENTS.keys() - {LOADING}:
            path = data / name.rstrip("/")
            path.mkdir(parents=True) if name.endswith("/") else path.touch()
    else:
        data.mkdir()
    data.chmod(mode)
    for _ in range(2):
        _open(data).close()
        assert _mode(data) == 0o700
    [told] = caplog.messages
    assert told == f"the data directory had mode {mode:04o}: closed it to others (0700)"


def test_a_directory_that_holds_other_files_too_is_left_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "page.html").touch()
    tmp_path.chmod(0o755)
    _open(tmp_path).close()
    assert _mode(tmp_path) == 0o755
    assert "it holds other files too" in caplog.text
    assert "0755" in caplog.text


@pytest.mark.parametrize(
    ("total", "free", "problem"),
    [
        (10 * LEAST_FREE, LEAST_FREE, None),
        (10 * LEAST_FREE, LEAST_FREE - 1_000_000, "has 99 MB left"),
        (10 * LEAST_FREE, LEAST_FREE - 1, "has 100 MB left"),
        (0, 0, None),
    ],
)
def test_a_disk_with_little_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, problem: str | None
) -> None:
    usage = SimpleNamespace(total=total, used=total - free, free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    told = problem and f"the disk of {tmp_path} {problem}"
    assert disk_problem(tmp_path) == disk_problem(tmp_path / "to" / "be" / "made") == told


@pytest.mark.parametrize("name", ["secret", "lock", "clock", "callbacks.jsonl", "conveyor.db"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConveyorError, match=f"its {name} is no regular file"):
        _open(tmp_path)
    assert directory_problem(tmp_path) == f"its {name} is no regular file"
    assert kept_secret(tmp_path) is None
