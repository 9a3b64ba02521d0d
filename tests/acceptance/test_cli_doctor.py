"""`conveyor doctor`: each fault that keeps a server from starting is brought about, and named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from conveyor.cli.server import _examined_start
from conveyor.client.doctor import Diagnosis, examine_start
from conveyor.clock import SystemClock
from conveyor.dev import directory
from conveyor.dev.sqlite import schema
from conveyor.domain.errors import ConveyorError
from conveyor.roles.serving import bound
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.patient import SECONDS

LABELS = ["python", "port", "directory", "disk", "schema", "secret", "clock"]


def examined(data_dir: Path, **words: object) -> dict[str, Diagnosis]:
    """Examine a start over this directory; the findings by label."""
    port, secret = words.pop("port", 0), words.pop("secret", "")
    settings = load({}, data_dir=str(data_dir), port=port, secret=secret)
    clock = words.pop("clock", FakeClock())
    told = list(examine_start(settings, clock, bound, **words))  # type: ignore[arg-type]
    assert [one.label for one in told] == LABELS
    return {one.label: one for one in told}


def wrong(data_dir: Path, **words: object) -> dict[str, str]:
    """The problems, by label."""
    told = examined(data_dir, **words)
    return {label: one.problem for label, one in told.items() if one.problem is not None}


def listed(path: Path) -> list[tuple[str, int]]:
    return sorted((one.name, one.stat().st_mtime_ns) for one in path.iterdir())


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The directory of a server that has ended."""
    with conveyor_server(tmp_path / "data"):
        pass
    return tmp_path / "data"


def test_nothing_is_wrong_with_a_new_directory_and_it_is_not_made(tmp_path: Path) -> None:
    assert wrong(tmp_path / "a" / "b") == {}
    assert listed(tmp_path) == []


def test_a_used_directory_is_left_as_it_was(used: Path) -> None:
    before = listed(used)
    assert wrong(used) == {}
    assert listed(used) == before


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = wrong(tmp_path, port=port)
    assert list(said) == ["port"]
    assert f"{port} of 127.0.0.1 is taken" in said["port"]


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    for path in (tmp_path / "data", tmp_path / "data" / "below"):
        assert wrong(path) == {"directory": f"{tmp_path / 'data'} is not a directory"}


def test_a_directory_in_use_is_named_with_its_server(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data"):
        said = wrong(tmp_path / "data")
    assert list(said) == ["directory"]
    assert f"in use by another conveyor-dev (pid {os.getpid()})" in said["directory"]


def test_a_damaged_secret_is_named(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (used / "secret").write_text("half")
    assert wrong(used) == {"directory": "its secret is damaged"}
    monkeypatch.chdir(used.parent)
    assert wrong(Path(used.name)) == {"directory": "its secret is damaged"}


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "gone")
    assert list(wrong(link)) == ["directory"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Mode bits do not keep root out, and /proc keeps everybody out."""
    said = wrong(Path("/proc/conveyor"))
    assert list(said) == ["directory"]
    assert said["directory"].startswith("cannot write to /proc: ")
    tmp_path.chmod(0o500)
    if os.geteuid() != 0:
        assert list(wrong(tmp_path)) == ["directory"]
    tmp_path.chmod(0o700)


def test_a_newer_schema_is_named(used: Path) -> None:
    with closing(sqlite3.connect(used / "conveyor.db")) as file:
        file.execute("PRAGMA user_version = 9999")
    said = wrong(used)
    assert list(said) == ["schema"]
    assert "newer Conveyor: its schema is 9999" in said["schema"]


def test_a_file_that_is_no_database_is_named(used: Path) -> None:
    (used / "conveyor.db").write_bytes(b"no database" * 1_000)
    assert list(wrong(used)) == ["schema"]


def test_bodies_without_their_records_are_named(tmp_path: Path) -> None:
    with conveyor_server(tmp_path) as booted:
        _submit(booted)
        booted.drain()
    (tmp_path / "conveyor.db").unlink()
    said = wrong(tmp_path)
    assert list(said) == ["schema"]
    assert "its conveyor.db is missing or empty" in said["schema"]
    assert refusal(tmp_path) == said["schema"]


def test_another_secret_than_that_of_the_records_is_named(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, secret="one" * 20) as booted:
        assert wrong(tmp_path, secret="two" * 20).keys() == {"directory"}  # nothing is sealed yet
        _submit(booted)
    for secret, is_wrong in (
        ("one" * 20, False),
        ("two" * 20 + "," + "one" * 20, False),
        ("two" * 20, True),
    ):
        said = wrong(tmp_path, secret=secret, clock=SystemClock())
        assert list(said) == ["secret"] * is_wrong
        if is_wrong:
            assert "under another root secret; set CONVEYOR_SECRET to that one" in said["secret"]
            assert refusal(tmp_path, secret=secret) == said["secret"]


def test_a_secret_that_is_gone_is_named(tmp_path: Path) -> None:
    with conveyor_server(tmp_path) as booted:
        _submit(booted)
    (tmp_path / "secret").unlink()
    said = wrong(tmp_path, clock=SystemClock())
    assert list(said) == ["secret"]
    assert "made under another root secret" in said["secret"]
    assert refusal(tmp_path) == said["secret"]
    assert not (tmp_path / "secret").exists()


@pytest.mark.parametrize("checked", [1 << 28, 0])
def test_damaged_pages_are_named(used: Path, checked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_CHECKED_WHOLE", checked)
    with open(used / "conveyor.db", "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        with closing(sqlite3.connect(used / "conveyor.db")) as reader:
            pages = reader.execute("SELECT rootpage FROM sqlite_schema WHERE type = 'table'")
            places = [page * 4_096 for (page,) in pages.fetchall()]
        for place in places:
            file.seek(place - 4_096)
            file.write(b"\xff" * min(4_096, size - place + 4_096))
    said = wrong(used)
    assert list(said) == ["schema"]
    assert "conveyor.db" in said["schema"]
    assert "damaged" in refusal(used)


@pytest.mark.parametrize(
    ("name", "is_file"), [("blobs", True), ("calls", False), ("clock", False), ("secret", False)]
)
def test_what_has_another_ones_place_is_named(used: Path, name: str, is_file: bool) -> None:
    shutil.rmtree(used / name) if (used / name).is_dir() else (used / name).unlink(missing_ok=True)
    (used / name).touch() if is_file else (used / name).mkdir()
    said = wrong(used)
    assert list(said) == ["directory"]
    assert said["directory"].startswith(f"its {name} is ")


def refusal(data_dir: Path, **settings: str) -> str:
    """One thing that keeps a server from starting."""
    with pytest.raises(ConveyorError) as caught, conveyor_server(data_dir, **settings):
        pass
    return caught.value.detail.removeprefix(f"{data_dir}: ")


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A real disk of 64 kB, in a namespace of its own; skipped where the machine allows none."""
    script = (
        'mount -t tmpfs -o size=64k tmpfs "$1" || exit 77\n'
        'head -c 65536 /dev/zero >"$1/all"\n'
        'exec "$2" -m conveyor doctor --port 0 --data-dir "$1"'
    )
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode != 0 and not done.stdout:
        pytest.skip(f"no disk of one's own: {done.stderr.strip()}")
    said = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
    assert (done.returncode, said) == (1, [f"WRONG   disk: the disk of {tmp_path} is full"])


def test_a_disk_with_little_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LEAST_FREE", 1 << 62)
    said = wrong(tmp_path)
    assert list(said) == ["disk"]
    assert said["disk"].endswith(" MB left")


def test_a_clock_before_what_is_stored_is_named(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, clock="manual", clock_start="2027-03-01T00:00:00Z") as booted:
        _submit(booted)
    early = FakeClock(start=1_798_761_600_000)  # 2027-01-01
    assert wrong(tmp_path, clock=early) == {}
    (tmp_path / "clock").unlink()
    said = wrong(tmp_path, clock=early)
    assert list(said) == ["clock"]
    assert "before what is stored" in said["clock"]


def test_a_clock_of_long_ago_is_named(tmp_path: Path) -> None:
    said = wrong(tmp_path, clock=FakeClock(start=1_000_000))
    assert said == {"clock": "it shows 1970-01-01 00:16:40 UTC, which has long passed"}


def test_an_old_python_is_named(tmp_path: Path) -> None:
    said = wrong(tmp_path, python=(3, 10, 13))
    assert said == {"python": "3.10.13 is too old: Conveyor needs 3.11"}


def _submit(server: ConveyorServer) -> None:
    import httpx

    answer = httpx.post(
        f"{server.base_url}/jobs",
        json={"tasks": [{"url": server.url("page")}]},
        headers={"X-API-Key": server.api_key},
        timeout=SECONDS,
    )
    assert answer.status_code in (201, 202), answer.text


def doctor(*words: str, **variables: str) -> tuple[int, str, str]:
    """Run the command; its exit code, output and errors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    kept.pop("ZENROWS_BATCH_BASE_URL", None)
    done = subprocess.run(
        [sys.executable, "-m", "conveyor", "doctor", *words],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_tells_a_line_each_and_ends_with_one_after_a_fault(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    code, said, errors = doctor(*where, "--port", "0")
    assert (code, errors) == (0, "")
    assert [line.split()[:2] for line in said.splitlines()] == [["ok", f"{x}:"] for x in LABELS]
    (tmp_path / "data").touch()
    code, said, errors = doctor(*where, "--port", "0", "--json")
    told = [json.loads(line) for line in said.splitlines()]
    assert (code, [one["label"] for one in told if one["problem"]]) == (1, ["directory"])
    assert [line.split()[0] for line in errors.splitlines()].count("WRONG") == 1
    code, said, errors = doctor(CONVEYOR_WORKERS="many")
    assert (code, errors) == (1, "")
    assert said == "WRONG   settings: CONVEYOR_WORKERS must be a whole number\n"


def test_a_file_of_hosts_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_HOSTS", str(tmp_path / "none"))
    [told] = _examined_start({"data_dir": str(tmp_path)})
    assert (told.label, told.problem) == (
        "settings",
        f"CONVEYOR_HOSTS {tmp_path / 'none'}: cannot be read: No such file or directory",
    )


@pytest.mark.slow
@pytest.mark.extended
def test_the_command_names_each_fault_that_is_brought_about(tmp_path: Path) -> None:
    """Seven of them, beside the full disk above. An older Python has no Conveyor to ask."""
    ahead = datetime.now(UTC) + timedelta(days=30)
    for name in ("used", "newer", "late"):
        start = ahead.isoformat() if name == "late" else ""
        mode = "manual" if name == "late" else "system"
        with conveyor_server(tmp_path / name, clock=mode, clock_start=start) as booted:
            _submit(booted)
    (tmp_path / "late" / "clock").unlink()
    with closing(sqlite3.connect(tmp_path / "newer" / "conveyor.db")) as file:
        file.execute("PRAGMA user_version = 9999")
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        faults: list[tuple[str, str, str, dict[str, str]]] = [
            ("settings", "0", "new", {"CONVEYOR_WORKERS": "many"}),
            ("port", port, "new", {}),
            ("directory", "0", "file", {}),
            ("schema", "0", "newer", {}),
            ("secret", "0", "used", {"CONVEYOR_SECRET": "another" * 8}),
            ("clock", "0", "late", {}),
            ("server", "0", "used", {"CONVEYOR_URL": "http://127.0.0.1:1"}),
        ]
        for label, at, name, variables in faults:
            where = ("--port", at, "--data-dir", str(tmp_path / name))
            code, said, _ = doctor(*where, **variables)
            wrong_lines = [line for line in said.splitlines() if not line.startswith("ok ")]
            assert (code, [line.split()[:2] for line in wrong_lines]) == (
                1,
                [["WRONG", f"{label}:"]],
            )


@pytest.mark.slow
def test_the_command_asks_a_server(conveyor_server: ConveyorServer) -> None:
    address = conveyor_server.base_url
    code, said, _ = doctor("--server", address)
    assert (code, said) == (0, f"ok      server: {address} answers: a development server\n")
    code, said, _ = doctor("--server", "http://127.0.0.1:1")
    assert code == 1
    assert said.startswith("WRONG   server: cannot reach http://127.0.0.1:1/v1")
    code, said, _ = doctor("--port", "0", CONVEYOR_URL=address)
    assert said.splitlines()[-1] == f"ok      server: {address} answers: a development server"
