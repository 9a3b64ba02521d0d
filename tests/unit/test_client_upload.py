"""Sending a file to its slot and submitting it, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from conveyor.client.errors import ClientError, InvalidTasks, ServerRefused
from conveyor.client.inputs import OpenInput, file_input, opened
from conveyor.client.options import CsvOptions, FileType
from conveyor.client.submit import PIECE_BYTES, JobOptions, submit_file
from conveyor.client.watch import run_of
from tests.unit.scripted_server import KEY, RUN, Answer, Script, asked, ok, problem

STORED: Answer = (200, {}, b"")
SLOT_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Steps:
    """A meter that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int | None]] = []
        self.done: list[int] = []

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def begin(self, step: str, total: int | None = None, *, unit: str | None = None) -> None:
        self.seen.append((step, total))

    def move(self, done: int = 0) -> None:
        self.done.append(done)


def slot_answer(server: Script) -> Answer:
    upload = {
        "method": "PUT",
        "url": f"{server.origin}/slot?signature=s",
        "headers": {"Content-Type": "text/csv"},
        "expires_at": "2026-01-01T00:00:00Z",
    }
    return ok({"file_input_id": SLOT_ID, "upload": upload, "expires_at": "2026-01-01T00:00:00Z"})


@pytest.mark.parametrize(("most", "fits"), [(29, False), (30, True), (None, True)])
async def test_a_file_over_the_limit_of_the_server_is_not_sent(
    tmp_path: Path, most: int | None, fits: bool
) -> None:
    with source(tmp_path / "a.csv", b"id,url\n" + b"a,http://a.test/1234567") as file:
        async with asked(ok({})) as (api, server, _):
            upload = {"url": f"{server.origin}/slot", "max_bytes": most}
            slot = ok({"file_input_id": SLOT_ID, "upload": upload})
            server.answers[:] = [slot, STORED, accepted()]
            if fits:
                await submit_file(api, file, JobOptions(), Steps())
            else:
                with pytest.raises(ClientError, match="30 bytes, and the server takes 29: split"):
                    await submit_file(api, file, JobOptions(), Steps())
    assert len(server.told) == (3 if fits else 1)


def accepted(tasks: int = 2) -> Answer:
    run = {**RUN, "ingest_status": "pending"}
    return ok({"job_id": "J", "latest_run": run, "accepted_tasks": tasks})


@contextmanager
def source(path: Path, content: bytes) -> Iterator[OpenInput]:
    path.write_bytes(content)
    chosen = file_input([str(path)], FileType.CSV, CsvOptions(external_id="id", header=True))
    assert chosen is not None
    with opened(chosen) as file:
        yield file


async def test_a_slot_the_bytes_and_a_job_that_names_the_slot(tmp_path: Path) -> None:
    content = b"id,url\n" + b"a,http://a/\n" * 50_000
    steps = Steps()
    with source(tmp_path / "big.csv", content) as file:
        async with asked(ok({})) as (api, server, _):
            server.answers[:] = [slot_answer(server), STORED, accepted()]
            reply = await submit_file(api, file, JobOptions(name="n"), steps)
    assert (reply.accepted_tasks, run_of(reply).ingesting) == (2, True)
    slot, put, job = server.told
    assert (slot.method, slot.path) == ("POST", "/v1/job_inputs")
    assert msgspec.json.decode(slot.body) == {
        "type": "csv",
        "csv": {
            "delimiter": ",",
            "quote": '"',
            "header": True,
            "fields": {"url": "url", "external_id": "id"},
        },
    }
    assert (put.method, put.path) == ("PUT", "/slot?signature=s")
    assert put.body == content
    assert put.headers["Content-Type"] == "text/csv"
    assert put.headers["Content-Length"] == str(len(content))
    assert "Transfer-Encoding" not in put.headers
    assert "X-API-Key" not in put.headers
    assert (job.method, job.path) == ("POST", "/v1/jobs")
    assert msgspec.json.decode(job.body) == {"name": "n", "file_input_id": SLOT_ID}
    assert (job.headers["X-API-Key"], job.headers["Idempotency-Key"]) == (KEY, "07" * 16)
    assert steps.seen == [("sending big.csv", len(content)), ("checking big.csv", None)]
    assert steps.done == [PIECE_BYTES, 2 * PIECE_BYTES, len(content)]


async def test_an_upload_that_breaks_is_begun_again_from_the_start(tmp_path: Path) -> None:
    content = b"id,url\na,http://a/\n"
    with source(tmp_path / "a.csv", content) as file:
        async with asked(ok({})) as (api, server, pace):
            broken: Answer = (0, {}, b"")
            busy: Answer = (503, {}, b"<Error>SlowDown</Error>")
            server.answers[:] = [slot_answer(server), broken, busy, STORED, accepted()]
            await submit_file(api, file, JobOptions(), Steps(), idempotency_key="mine")
    assert [told.body for told in server.told[1:4]] == [content] * 3
    assert server.told[4].headers["Idempotency-Key"] == "mine"
    assert pace.slept == [0.25, 0.5]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            problem(413, "payload_too_large", detail="too large"),
            "too large (413 payload_too_large)",
        ),
        ((403, {}, b"<Error/>"), "the upload link answered 403 (403 internal)"),
        ((301, {"Location": "/x"}, b""), "the upload link answered 301 (301 internal)"),
    ],
)
async def test_a_file_that_is_refused_makes_no_job(
    tmp_path: Path, answer: Answer, message: str
) -> None:
    with source(tmp_path / "a.csv", b"id,url\n") as file:
        async with asked(ok({})) as (api, server, _):
            server.answers[:] = [slot_answer(server), answer]
            with pytest.raises(ServerRefused) as caught:
                await submit_file(api, file, JobOptions(), Steps())
    assert str(caught.value) == message
    assert [told.path for told in server.told] == ["/v1/job_inputs", "/slot?signature=s"]


async def test_refused_records_are_a_line_each_and_the_server_says_how_many(
    tmp_path: Path,
) -> None:
    bad = [
        {"index": number, "reason": "malformed_url", "value": "x\x1b", "line": number + 2}
        for number in range(100)
    ]
    refusal = problem(400, "invalid_argument", detail="100 of 120 tasks", invalid_tasks=bad)
    with source(tmp_path / "a.csv", b"id,url\n") as file:
        async with asked(ok({})) as (api, server, _):
            server.answers[:] = [slot_answer(server), STORED, refusal]
            with pytest.raises(InvalidTasks) as caught:
                await submit_file(api, file, JobOptions(), Steps())
    name = tmp_path / "a.csv"
    assert str(caught.value) == "100 of 120 tasks (400 invalid_argument)"
    assert len(caught.value.lines) == 20
    problem_in_words = "URL must start with http:// or https:// (for bare hosts add --scheme https)"
    assert caught.value.lines[1] == f"{name}: record 2 at line 3: x\\x1b: {problem_in_words}"


async def test_a_file_that_shrinks_is_told_and_makes_no_job(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with source(path, b"id,url\n" * 3) as file:
        path.write_bytes(b"id")
        async with asked(ok({})) as (api, server, _):
            server.answers[:] = [slot_answer(server), STORED, accepted()]
            with pytest.raises(ClientError, match="a.csv became shorter while it was sent$"):
                await submit_file(api, file, JobOptions(), Steps())
    assert "/v1/jobs" not in [told.path for told in server.told]


async def test_a_file_that_grows_is_sent_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with source(path, b"id,url\n") as file:
        with path.open("ab") as more:
            more.write(b"late")
        async with asked(ok({})) as (api, server, _):
            server.answers[:] = [slot_answer(server), STORED, accepted()]
            await submit_file(api, file, JobOptions(), Steps())
    assert server.told[1].body == b"id,url\n"
