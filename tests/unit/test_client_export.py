"""Exports, request by request, and the file that they end in."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest

from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.errors import ClientError
from conveyor.client.export import export_job
from tests.unit.scripted_server import (
    KEY,
    RUN,
    Answer,
    Pace,
    Script,
    ok,
    problem,
    scripted,
)

EXPORT = {"export_id": "E", "created_at": "2026-01-01T00:00:00Z"}
RUNNING = ok({**EXPORT, "status": "running"})
JOB = ok({"job_id": "J", "status": "closed", "latest_run": {**RUN, "status": "completed"}})


def started() -> Answer:
    return 202, {}, msgspec.json.encode({**EXPORT, "status": "pending"})


def completed(server: Script, link: str = "/export?signature=s") -> Answer:
    return ok({**EXPORT, "status": "completed", "download_url": server.origin + link})


async def exported(server: Script, pace: Pace, out: Path | None, **flags: object) -> int:
    chosen = {"run_id": None, "form": "zip", "force": False, **flags}
    target = ServerTarget(server.origin, KEY, pace)
    return await export_job(target, Terminal(), "J", out=out, **chosen)  # type: ignore[arg-type]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_asked_for_polled_and_fetched_without_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace()
    with scripted(JOB) as server:
        done = completed(server)
        server.answers[:] = [JOB, started(), RUNNING, RUNNING, done, done, (200, {}, b"zipped")]
        out = tmp_path / "new" / "out.zip"
        assert await exported(server, pace, out) == 0
    assert out.read_bytes() == b"zipped"
    assert names(out.parent) == ["out.zip"]
    assert [(told.method, told.path) for told in server.told] == [
        ("GET", "/v1/jobs/J"),
        ("POST", "/v1/jobs/J/runs/R/exports?format=zip"),
        ("GET", "/v1/jobs/J/runs/R/exports/E"),
        ("GET", "/v1/jobs/J/runs/R/exports/E"),
        ("GET", "/v1/jobs/J/runs/R/exports/E"),
        ("GET", "/v1/jobs/J/runs/R/exports/E"),
        ("GET", "/export?signature=s"),
    ]
    assert server.told[1].body == b""
    assert "X-API-Key" not in server.told[-1].headers
    assert pace.slept == pytest.approx([0.1, 0.14, 0.196])
    assert capsys.readouterr().out == f"6 B in {out}\n"


async def test_a_named_run_and_one_that_is_not_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(JOB) as server:
        server.answers[:] = [ok(RUN), completed(server), completed(server), (200, {}, b"{}")]
        await exported(server, Pace(), tmp_path / "o.jsonl", run_id="R", form="jsonl")
    assert [told.path for told in server.told[:2]] == [
        "/v1/jobs/J/runs/R",
        "/v1/jobs/J/runs/R/exports?format=jsonl",
    ]
    told = capsys.readouterr().err
    assert "the run is running: the export holds each row as it is when read" in told


@pytest.mark.slow
async def test_waiting_is_quick_at_first_then_every_two_seconds(tmp_path: Path) -> None:
    pace = Pace()
    with scripted(JOB) as server:
        done = completed(server)
        server.answers[:] = [JOB, started(), *[RUNNING] * 20, done, done, (200, {}, b"")]
        await exported(server, pace, tmp_path / "o.zip")
    assert pace.slept == sorted(pace.slept)
    assert pace.slept[-1] == 2.0


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [ok({**EXPORT, "status": "failed", "error": "results are larger than 100 gb\x1b"})],
            "the export failed: results are larger than 100 gb\\x1b",
        ),
        ([ok({**EXPORT, "status": "new"})], "the export failed: new"),
        (
            [problem(400, "invalid_argument", detail="format: no")],
            "job J: format: no (400 invalid_argument)",
        ),
        ([problem(404, "not_found")], "no such job: J"),
        ([ok({**EXPORT, "status": "completed"})] * 2, "the export is completed, but has no link"),
    ],
)
async def test_a_failure_is_told_and_leaves_no_file(
    tmp_path: Path, answers: list[Answer], message: str
) -> None:
    with scripted(JOB) as server:
        server.answers[:] = [JOB, *answers]
        with pytest.raises(ClientError) as caught:
            await exported(server, Pace(), tmp_path / "o.zip")
    assert str(caught.value) == message
    assert names(tmp_path) == []


@pytest.mark.parametrize(("run_id", "asked"), [("R2", 1), ("..", 0), (".", 0)])
async def test_a_run_that_is_not_there_is_named(tmp_path: Path, run_id: str, asked: int) -> None:
    with scripted(problem(404, "not_found")) as server:
        with pytest.raises(ClientError) as caught:
            await exported(server, Pace(), tmp_path / "o.zip", run_id=run_id)
        assert len(server.told) == asked
    assert str(caught.value) == f"job J has no run {run_id}"


async def test_a_transfer_that_breaks_is_begun_again_by_a_fresh_link(tmp_path: Path) -> None:
    pace = Pace()
    short: Answer = (200, {"Content-Length": "10"}, b"half")
    with scripted(JOB) as server:
        links = [completed(server, f"/{number}") for number in range(3)]
        server.answers[:] = [JOB, links[0], links[1], short, links[2], (200, {}, b"whole")]
        await exported(server, pace, tmp_path / "o.zip")
    assert (tmp_path / "o.zip").read_bytes() == b"whole"
    assert [told.path for told in server.told if "/jobs" not in told.path] == ["/1", "/2"]
    assert pace.slept == [0.5]


async def test_a_transfer_that_always_breaks_leaves_no_file(tmp_path: Path) -> None:
    with scripted(JOB) as server:
        done = completed(server)
        short: Answer = (200, {"Content-Length": "10"}, b"half")
        server.answers[:] = [JOB, done, *[done, short] * 3]
        with pytest.raises(ClientError, match="^export download failed: "):
            await exported(server, Pace(), tmp_path / "o.zip")
    assert names(tmp_path) == []


async def test_a_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "o.zip"
    out.write_bytes(b"old")
    with scripted(JOB) as server:
        with pytest.raises(ClientError, match=r"o\.zip already exists \(--force replaces it\)$"):
            await exported(server, Pace(), out)
        assert server.told == []
        done = completed(server)
        server.answers[:] = [JOB, done, done, (200, {}, b"new")]
        await exported(server, Pace(), out, force=True)
        assert out.read_bytes() == b"new"


async def test_a_file_that_came_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "o.zip"

    class Meanwhile(Pace):
        async def sleep(self, seconds: float) -> None:
            out.write_bytes(b"of another")

    with scripted(JOB) as server:
        done = completed(server)
        server.answers[:] = [JOB, started(), done, done, (200, {}, b"new")]
        with pytest.raises(ClientError, match="already exists"):
            await exported(server, Meanwhile(), out)
    assert out.read_bytes() == b"of another"
    assert names(tmp_path) == ["o.zip"]


@pytest.mark.parametrize("where", ["taken/o.zip", ".", "pipe"])
async def test_what_cannot_be_written_is_found_before_anything_is_asked(
    tmp_path: Path, where: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    os.mkfifo(tmp_path / "pipe")  # as a device would, it must not become a file
    with scripted(JOB) as server, pytest.raises(ClientError):
        await exported(server, Pace(), tmp_path / where, force=True)
    assert server.told == []


async def test_standard_output_gets_the_bytes_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    with scripted(JOB) as server:
        done = completed(server)
        server.answers[:] = [JOB, done, done, (200, {}, b"\x00\xffzip")]
        assert await exported(server, Pace(), None) == 0
    assert written.getvalue() == b"\x00\xffzip"
