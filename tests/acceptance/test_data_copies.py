"""`conveyor-dev data`: copies of a running server, whole whatever it does, and what they hold."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor import __version__
from conveyor.cli import dev_main
from conveyor.clock import SystemClock
from conveyor.dev.copies import load_copy, save_copy
from conveyor.dev.directory import DataDirectory, directory_problem
from conveyor.dev.segments import read_packed
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Format, StoredBody
from conveyor.records.packed_bodies import packed_body
from conveyor.testing.clock import FakeClock
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_wire import eventually
from tests.conformance.world import CALLER
from tests.disk import files_below
from tests.patient import SECONDS
from tests.unit.earlier_files import BEFORE_WEBHOOKS, EarlierFile, write_earlier_file

CLOCK = SystemClock()


@contextmanager
def _api(server: ConveyorServer, key: str = "") -> Iterator[httpx.Client]:
    headers = {"X-API-Key": key or server.api_key}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=SECONDS) as client:
        yield client


def _submit(api: httpx.Client, *urls: str, **fields: object) -> str:
    answer = api.post("/jobs", json={"tasks": [{"url": url} for url in urls], **fields})
    assert answer.status_code in (201, 202), answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


def _check_whole(directory: Path) -> int:
    """Count the successful rows of a copy; each has its body. A server starts over it."""
    with closing(sqlite3.connect(directory / "conveyor.db")) as connection:
        rows = connection.execute(
            "SELECT result FROM tasks LEFT JOIN histories USING (task_key) WHERE state = 1"
        ).fetchall()
    for (result,) in rows:
        body = json.loads(result)
        place = packed_body(body["blob_key"])
        if place is None:
            assert (directory / "blobs" / body["blob_key"]).stat().st_size == body["size"]
        else:
            assert read_packed(str(directory / "blobs"), place) is not None
    with conveyor_server(directory) as server, _api(server) as api:
        assert api.get("/jobs").status_code == 200
    return len(rows)


def _counted(database: Path) -> list[tuple[int, ...]]:
    """The counters of each run, and what its rows say."""
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(
            "SELECT total, successful, failed, (SELECT count(*) FROM tasks WHERE task_key >> 35 "
            ">= run_no AND task_key >> 35 < run_no + shard_count), (SELECT count(*) FROM tasks "
            "WHERE state = 1 AND task_key >> 35 >= run_no AND task_key >> 35 < run_no + "
            "shard_count), (SELECT count(*) FROM tasks WHERE state = 2 AND task_key >> 35 >= "
            "run_no AND task_key >> 35 < run_no + shard_count) FROM runs WHERE NOT ingesting "
            "AND status <> 'deleted'"
        ).fetchall()


def _save(directory: Path, file: Path) -> None:
    """Save a copy by a process of its own."""
    program = "from conveyor.cli import dev_main; dev_main()"
    words = ("data", "save", str(file), "--data-dir", str(directory))
    subprocess.run(
        [sys.executable, "-c", program, *words], check=True, timeout=SECONDS, stdout=subprocess.PIPE
    )


def _await_calls(server: ConveyorServer, calls: int) -> None:
    eventually(lambda: server.hits.total > calls or None, "100 calls")


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(20, marks=[pytest.mark.slow, pytest.mark.extended]),
    ],
)
def test_copies_under_load_are_whole(tmp_path: Path, copies: int) -> None:
    with conveyor_server(tmp_path / "data") as server:
        done = threading.Event()

        def use(number: int) -> None:
            """Submit and remove, so that the store is busy and stays small."""
            with _api(server) as api:
                pages = [server.url(f"{number}/{page}", flaky=page % 2) for page in range(40)]
                pages += [server.url("large", size=300_000), server.url("gone", status=404)]
                made: list[str] = []
                while not done.is_set():
                    made.append(_submit(api, *pages))
                    if len(made) > 10:
                        api.delete(f"/jobs/{made.pop(number)}")

        users = [threading.Thread(target=use, args=(number,)) for number in range(2)]
        for user in users:
            user.start()
        try:
            for number in range(copies):
                _await_calls(server, server.hits.total + 100)
                _save(tmp_path / "data", tmp_path / f"{number}.tar")
        finally:
            done.set()
            for user in users:
                user.join()
    found = 0
    for number in range(copies):
        into = tmp_path / f"copy{number}"
        load_copy(tmp_path / f"{number}.tar", into)
        for total, successful, failed, *rows in _counted(into / "conveyor.db"):
            assert [total, successful, failed] == rows
        found += _check_whole(into)
        shutil.rmtree(into)
    assert found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a server that has ended, with a job of each of two callers."""
    directory = tmp_path_factory.mktemp("data")
    with conveyor_server(directory) as server:
        for key in (server.api_key, "another-key"):
            with _api(server, key) as api:
                api.post("/webhooks/signing-keys")
                webhook = {"url": f"{server.inbox}/ends"}
                _submit(api, server.url("page", size=400), server.url("gone", status=404))
                _submit(api, server.url("more", size=300_000), webhook=webhook)
        server.drain()
    return directory


def test_a_copy_is_for_its_owner_alone_and_has_all_that_a_server_needs(
    filled: Path, tmp_path: Path
) -> None:
    file, into = tmp_path / "copy.tar", tmp_path / "into"
    saved = save_copy(filled, file, CLOCK)
    assert saved.has_secret
    assert saved.size == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    load_copy(file, into)
    assert stat.S_IMODE(into.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_below(into)} == {0o600}
    assert (into / "secret").read_bytes() == (filled / "secret").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    assert not list((filled / "blobs" / "tmp").iterdir())
    assert _check_whole(into) == 4
    for refused in (lambda: save_copy(filled, file, CLOCK), lambda: load_copy(file, into)):
        before = sorted(map(str, files_below(into)))
        with pytest.raises(ConveyorError, match="already|not empty"):
            refused()
        assert sorted(map(str, files_below(into))) == before


def test_a_copy_for_sharing_has_no_key_and_no_caller_of_before(
    filled: Path, tmp_path: Path
) -> None:
    file, into = tmp_path / "copy.tar", tmp_path / "into"
    saved = save_copy(filled, file, CLOCK, for_sharing=True)
    assert saved.keys == ("caller-1", "caller-2")
    load_copy(file, into)
    with closing(sqlite3.connect(filled / "conveyor.db")) as connection:
        private = [
            value if isinstance(value, bytes) else value.encode()
            for sql in (
                "SELECT caller FROM jobs",
                "SELECT sealed_key FROM jobs",
                "SELECT sealed FROM signing_keys",
                "SELECT fingerprint FROM root_secrets",
            )
            for (value,) in connection.execute(sql)
        ]
    assert len(private) >= 9
    private += [(filled / "secret").read_bytes().strip(), b"another-key", b"test-key"]
    content = b"".join(path.read_bytes() for path in files_below(into))
    assert [value for value in private if value in content] == []
    with conveyor_server(into) as server:
        for key in saved.keys:
            with _api(server, key) as api:
                jobs = api.get("/jobs").json()["jobs"]
                assert len(jobs) == 2
                [row] = api.get(f"/jobs/{jobs[0]['job_id']}/results").json()["results"]
                body = api.get(row["result_url"].replace(server.base_url, ""))
                assert (body.status_code, len(body.content)) == (200, 300_000)
                again = api.post(f"/jobs/{jobs[1]['job_id']}/rerun", json={})
                assert again.status_code < 500, again.text
        with _api(server) as api:
            assert api.get("/jobs").json()["jobs"] == []


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        dev_main(list(words))
    return int(ended.value.code or 0)


def test_both_commands_speak_json(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, into = tmp_path / "copy.tar", tmp_path / "into"
    assert _run("data", "save", str(file), "--data-dir", str(filled), "--json") == 0
    saved = json.loads(capsys.readouterr().out)
    assert saved == {
        "file": str(file),
        "bytes": file.stat().st_size,
        "has_secret": True,
        "for_sharing": False,
        "keys": [],
    }
    assert _run("data", "load", str(file), "--data-dir", str(into), "--json") == 0
    loaded = json.loads(capsys.readouterr().out)
    assert loaded == {"directory": str(into), "saved_by": __version__}


@pytest.mark.parametrize("for_sharing", [False, True])
def test_a_copy_of_an_older_version_is_brought_on(tmp_path: Path, for_sharing: bool) -> None:
    older, file, secret = tmp_path / "older", tmp_path / "older.tar", b"s" * 32
    body = StoredBody("results/14/job/run/aaaaa/task.1", 4, "text/html", Format.HTML)
    (older / "blobs" / body.blob_key).parent.mkdir(parents=True)
    (older / "blobs" / body.blob_key).write_bytes(b"page")
    (older / "secret").write_text(f"{secret.hex()}\n")
    sealed = KeySealer([secret]).seal("key", caller=CALLER, nonce=b"n" * NONCE_LENGTH)

    def fill(earlier: EarlierFile) -> None:
        earlier.succeed(earlier.submit(2, token="token-of-a-task", sealed=sealed), 0, body)

    write_earlier_file(older / "conveyor.db", FakeClock(), version=BEFORE_WEBHOOKS, fill=fill)
    save_copy(older, file, CLOCK, for_sharing=for_sharing)
    load_copy(file, tmp_path / "into")
    content = b"".join(path.read_bytes() for path in files_below(tmp_path / "into"))
    for private in (b"token-of-a-task", sealed):
        assert (private in content) is not for_sharing
    assert _check_whole(tmp_path / "into") == 1


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_copy_that_is_cut_fills_nothing(filled: Path, tmp_path: Path, share: float) -> None:
    file = tmp_path / "copy.tar"
    saved = save_copy(filled, file, CLOCK)
    # The last blocks of a tar are empty.
    os.truncate(file, int((saved.size - 20_480) * share))
    with pytest.raises(ConveyorError, match="cut off or damaged"):
        load_copy(file, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_pipe_without_a_writer_is_no_copy_and_one_with_a_writer_is_read(
    filled: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    _check_refused(pipe)
    save_copy(filled, tmp_path / "copy.tar", CLOCK)
    with subprocess.Popen(["cat", tmp_path / "copy.tar"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        load_copy(Path(f"/dev/fd/{writer.stdout.fileno()}"), tmp_path / "into")
    assert _check_whole(tmp_path / "into")


@pytest.mark.parametrize("last", ["blobs", "secret"])
def test_what_a_killed_load_left_is_no_data_and_the_next_load_fills_it(
    filled: Path, tmp_path: Path, last: str
) -> None:
    file, into = tmp_path / "copy.tar", tmp_path / "into"
    save_copy(filled, file, CLOCK)
    _run_until(["load", str(file), "--data-dir", str(into)], into / last, signal.SIGKILL)
    assert (into / last).exists()
    with pytest.raises(ConveyorError, match="was not loaded to its end"):
        DataDirectory.open(into, CLOCK)
    assert "was not loaded to its end" in (directory_problem(into) or "")
    load_copy(file, into)
    DataDirectory.open(into, CLOCK).close()
    assert _check_whole(into)


def test_a_copy_that_is_ended_by_a_signal_leaves_nothing(filled: Path, tmp_path: Path) -> None:
    file, into = tmp_path / "copy.tar", tmp_path / "into"
    save_copy(filled, file, CLOCK)
    load = ["load", str(file), "--data-dir", str(into)]
    assert _run_until(load, into / "secret", signal.SIGTERM) == 128 + signal.SIGTERM
    assert not into.exists()
    before = sorted(files_below(filled))
    save = ["save", str(tmp_path / "other.tar"), "--data-dir", str(filled)]
    assert _run_until(save, filled / "blobs/tmp", signal.SIGTERM) == 128 + signal.SIGTERM
    assert sorted(files_below(filled)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["copy.tar"]


_HALTED = """
import os, signal, sys, tarfile
from pathlib import Path
from conveyor.cli import dev_main

until, number = Path(sys.argv[1]), int(sys.argv[2])
opened = tarfile.TarFile.{function}

def halting(*given, **named):
    if until.exists() and (until.is_file() or any(until.iterdir())):
        os.kill(os.getpid(), number)
    return opened(*given, **named)

tarfile.TarFile.{function} = halting
dev_main(["data", *sys.argv[3:]])
"""


def _run_until(arguments: list[str], until: Path, number: int) -> int:
    """Run `data` with a signal to itself as soon as a file is there, or a directory with anything
    in it; return its exit code."""
    function = "extractfile" if arguments[0] == "load" else "addfile"
    program = _HALTED.replace("{function}", function)
    command = [sys.executable, "-c", program, str(until), str(int(number)), *arguments]
    return subprocess.run(command, timeout=SECONDS, check=False).returncode


@pytest.mark.parametrize("name", ["../secret", "blobs/../../x", "lock", "blobs/tmp/x", "/etc/x"])
def test_a_file_that_no_copy_has_is_not_unpacked(filled: Path, tmp_path: Path, name: str) -> None:
    save_copy(filled, tmp_path / "copy.tar", CLOCK)
    with tarfile.open(tmp_path / "copy.tar") as given, tarfile.open(tmp_path / "b.tar", "w") as bad:
        for entry in given:
            if entry.name == "secret":
                entry.name = name
            bad.addfile(entry, given.extractfile(entry))
    with pytest.raises(ConveyorError, match="no copy"):
        load_copy(tmp_path / "b.tar", tmp_path / "into")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "copy.tar"]


def test_a_directory_in_use_is_not_filled_and_stays_as_it_is(filled: Path, tmp_path: Path) -> None:
    save_copy(filled, tmp_path / "copy.tar", CLOCK)
    taken = DataDirectory.open(tmp_path / "into", CLOCK, secret="s" * 64)
    try:
        with pytest.raises(ConveyorError, match="in use"):
            load_copy(tmp_path / "copy.tar", tmp_path / "into")
        assert [path.name for path in (tmp_path / "into").iterdir()] == ["lock"]
    finally:
        taken.close()
    load_copy(tmp_path / "copy.tar", tmp_path / "into")


def test_of_loads_at_a_time_one_fills_the_directory(filled: Path, tmp_path: Path) -> None:
    file = tmp_path / "copy.tar"
    save_copy(filled, file, CLOCK)
    for number in range(10):
        into = tmp_path / str(number)
        ready = threading.Barrier(4)

        def load(into: Path = into, ready: threading.Barrier = ready) -> str:
            ready.wait()
            try:
                load_copy(file, into)
            except ConveyorError as error:
                return error.detail
            return ""

        with ThreadPoolExecutor(4) as threads:
            ends = [one.result() for one in [threads.submit(load) for _ in range(4)]]
        assert ends.count("") == 1, ends
        with closing(sqlite3.connect(into / "conveyor.db")) as connection:
            assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (4,)
        shutil.rmtree(into)


def _has_pending_delivery(database: Path) -> bool | None:
    with closing(sqlite3.connect(database)) as connection:
        sql = "SELECT 1 FROM deliveries WHERE status = 'pending' AND record ->> 'attempt_count' > 0"
        return bool(connection.execute(sql).fetchall()) or None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for sharing of a server with a live run, and with an event that waits for another
    attempt."""
    directory = tmp_path_factory.mktemp("live")
    with conveyor_server(directory / "data") as server, _api(server) as api:
        hook = {"url": "http://127.0.0.1:1/secret-of-hook"}
        _submit(api, server.url("page"), webhook=hook)
        _submit(api, server.url("slow", delay=600), webhook=hook)
        eventually(
            lambda: _has_pending_delivery(directory / "data" / "conveyor.db"), "a failed event"
        )
        save_copy(directory / "data", directory / "copy.tar", CLOCK, for_sharing=True)
    return directory / "copy.tar"


def test_a_copy_for_sharing_sends_nothing(shared: Path, tmp_path: Path) -> None:
    load_copy(shared, tmp_path / "into")
    content = b"".join(path.read_bytes() for path in files_below(tmp_path / "into"))
    assert b"secret-of-hook" not in content
    with closing(sqlite3.connect(tmp_path / "into" / "conveyor.db")) as connection:
        for sql in ("FROM notices", "FROM deliveries WHERE status = 'pending'"):
            assert connection.execute(f"SELECT count(*) {sql}").fetchone() == (0,)


def test_schedules_of_a_copy_for_sharing_are_paused(tmp_path: Path) -> None:
    daily = {"times_of_day": ["07:00"], "cadence": {"daily": {}}}
    schedule = {"calendar": daily, "timezone": "UTC"}
    with conveyor_server(tmp_path / "data") as server, _api(server) as api:
        _submit(api, server.url("page"), type="scheduled", schedule=schedule)
        save_copy(tmp_path / "data", tmp_path / "copy.tar", CLOCK, for_sharing=True)
    load_copy(tmp_path / "copy.tar", tmp_path / "into")
    with closing(sqlite3.connect(tmp_path / "into" / "conveyor.db")) as connection:
        [(scheduling,)] = connection.execute("SELECT scheduling FROM jobs")
    assert "key_hash" not in scheduling
    with conveyor_server(tmp_path / "into") as server, _api(server, "caller-1") as api:
        [job] = api.get("/jobs").json()["jobs"]
        shown = api.get(f"/jobs/{job['job_id']}/schedule")
        assert shown.json()["schedule_state"] == "paused", shown.text
        state = {"schedule_state": "active"}
        active = api.post(f"/jobs/{job['job_id']}/schedule/state", json=state)
        assert active.is_success, active.text
        assert "next_scheduled_run" in api.get(f"/jobs/{job['job_id']}/schedule").json()


def _check_refused(file: Path) -> None:
    """A file that is damaged fills nothing."""
    into = file.parent / "into"
    with pytest.raises(ConveyorError, match="cut off or damaged"):
        load_copy(file, into)
    assert not into.exists()


@pytest.mark.parametrize("name", ["copy.json", "secret", "blobs/", "conveyor.db"])
def test_a_copy_with_a_changed_byte_fills_nothing(filled: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "copy.tar"
    save_copy(filled, file, CLOCK)
    with tarfile.open(file) as tar:
        entry = next(entry for entry in tar if entry.name.startswith(name))
    content = bytearray(file.read_bytes())
    content[entry.offset_data + entry.size // 2] ^= 1
    file.write_bytes(content)
    _check_refused(file)


def test_a_copy_of_a_damaged_database_fills_nothing(filled: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "data"
    shutil.copytree(filled, damaged)
    with closing(sqlite3.connect(damaged / "conveyor.db")) as connection:
        sql = "SELECT rootpage FROM sqlite_schema WHERE name = 'tasks_by_state'"
        (page,) = connection.execute(sql).fetchone()
    with open(damaged / "conveyor.db", "r+b") as database:
        database.seek((page - 1) * 4096)
        database.write(b"\xff" * 4096)
    save_copy(damaged, tmp_path / "copy.tar", CLOCK)
    _check_refused(tmp_path / "copy.tar")


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_a_compressed_copy_is_loaded_whole_or_not_at_all(
    filled: Path, tmp_path: Path, module: Any
) -> None:
    save_copy(filled, tmp_path / "copy.tar", CLOCK)
    packed, file = module.compress((tmp_path / "copy.tar").read_bytes()), tmp_path / "packed"
    file.write_bytes(packed)
    load_copy(file, tmp_path / "into")
    assert _check_whole(tmp_path / "into") == 4
    shutil.rmtree(tmp_path / "into")
    for place in (len(packed) // 2, len(packed) - 7):
        file.write_bytes(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
        _check_refused(file)
    file.write_bytes(packed[:-9])
    _check_refused(file)


def test_a_copy_for_sharing_names_no_caller_whose_jobs_are_gone(
    filled: Path, tmp_path: Path
) -> None:
    left, gone = tmp_path / "data", ("a-caller-of-before", "a-caller-of-a-day", "an-old-caller")
    shutil.copytree(filled, left)
    with closing(sqlite3.connect(left / "conveyor.db")) as connection, connection:
        connection.execute(
            "INSERT INTO deliveries VALUES ('id', ?1, 'job', 'delivered', 1, 1, 0, 0, 1, "
            "json_object('caller', ?1))",
            gone[:1],
        )
        connection.execute("INSERT INTO daily_tasks VALUES (20000, ?, 5)", gone[1:2])
        runs = "SELECT run_no FROM runs LIMIT 1"
        connection.execute(f"UPDATE runs SET caller = ? WHERE run_no IN ({runs})", gone[2:])
    content = (left / "conveyor.db").read_bytes()
    assert [name for name in gone if name.encode() not in content] == []
    saved = save_copy(left, tmp_path / "copy.tar", CLOCK, for_sharing=True)
    assert saved.keys == ("caller-1", "caller-2", "caller-3", "caller-4")
    load_copy(tmp_path / "copy.tar", tmp_path / "into")
    content = b"".join(path.read_bytes() for path in files_below(tmp_path / "into"))
    assert [name for name in gone if name.encode() in content] == []


def test_a_body_that_grows_meanwhile_is_whole_without_links(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "a file system without links")

    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "data"
    shutil.copytree(filled, source)
    body = next(iter(files_below(source / "blobs")))
    stages, bodies = source / "blobs" / "tmp", len(list(files_below(source / "blobs")))
    with (
        closing(sqlite3.connect(source / "conveyor.db", isolation_level=None)) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        server.execute("BEGIN IMMEDIATE")
        saving = thread.submit(save_copy, source, tmp_path / "copy.tar", CLOCK)
        try:
            eventually(
                lambda: len(list(files_below(stages))) == bodies or saving.done() or None, "copies"
            )
            with open(body, "ab") as stream:
                stream.write(b"the last of many")
        finally:
            server.execute("ROLLBACK")
        saving.result()
    load_copy(tmp_path / "copy.tar", tmp_path / "into")
    assert (tmp_path / "into" / body.relative_to(source)).read_bytes() == body.read_bytes()


@pytest.mark.parametrize(
    "names",
    [
        ("secret", "secret"),
        ("blobs/a", "blobs/a/b"),
        ("blobs/a/b", "blobs/a"),
        ("b" * 300,),
        ("blobs/" + "b" * 300,),
        ("blobs/a\0b",),
        (),
    ],
)
def test_an_archive_of_somebody_else_is_refused_in_words(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    about = {"form": 1, "version": "1", "schema": 1, "for_sharing": False}
    files = [("copy.json", json.dumps(about).encode()), *((name, b"x") for name in names)]
    with tarfile.open(tmp_path / "copy.tar", "w") as tar:
        for name, content in [*files, ("conveyor.db", b"")]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.pax_headers = {
                "path": name,
                "CONVEYOR.sha256": hashlib.sha256(content).hexdigest(),
            }
            tar.addfile(entry, BytesIO(content))
    _check_refused(tmp_path / "copy.tar")


def test_live_runs_of_a_copy_for_sharing_are_paused(shared: Path, tmp_path: Path) -> None:
    load_copy(shared, tmp_path / "into")
    with conveyor_server(tmp_path / "into") as server, _api(server, "caller-1") as api:
        jobs = api.get("/jobs").json()["jobs"]
        runs = [api.get(f"/jobs/{job['job_id']}").json()["latest_run"] for job in jobs]
        assert sorted(run["status"] for run in runs) == ["completed", "running"], runs
        [live] = [run for run in runs if run["status"] == "running"]
        assert live["stats"]["failed"] == 0
        assert live["waiting"]["reason"] == "paused", live
