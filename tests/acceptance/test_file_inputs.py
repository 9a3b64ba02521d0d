"""Files of tasks, from the slot to the results: through the public client, and by hand."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch import BatchAPIError, ZenRowsBatchClient
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import IngestStatus

from tests.acceptance.support_bindings import FLEET, Serving, bodies
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, Json, as_json, problem_of
from tests.acceptance.support_client import (
    FLEET_SETTINGS,
    NOWHERE,
    finish,
    open_client,
    refused,
    urls,
)
from tests.acceptance.support_data import temporary_files
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_raw import answers_to
from tests.acceptance.support_wire import eventually, target

MAX_ROWS = 60
MAX_BYTES = 40_000
MAX_REQUEST = 8_192
LARGE_FROM = 40
"""Tasks of a file from which its rows are written after the answer."""

BY_INDEX: Json = {"type": "csv", "csv": {"fields": {"url": 0}}}
BY_NAME: Json = {"type": "csv", "csv": {"header": True, "fields": {"url": "url"}}}
WITH_ID: Json = {"type": "csv", "csv": {"fields": {"url": 0, "external_id": 1}}}
JSONL: Json = {"type": "jsonl"}
URLS: Json = {"type": "urls"}
GOOD: dict[str, bytes] = {
    "csv": b"http://fake.test/good,id\n",
    "jsonl": b'{"url": "http://fake.test/good"}\n',
    "urls": b"http://fake.test/good\n",
}


LIMITS: dict[str, Any] = {
    "max_input_rows": MAX_ROWS,
    "max_input_bytes": MAX_BYTES,
    "max_request_bytes": MAX_REQUEST,
    "async_threshold": LARGE_FROM,
}


@pytest.fixture(scope="module")
def server(binding: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("inputs")
    if binding == FLEET:
        with fleet(directory, **FLEET_SETTINGS | LIMITS) as running:
            yield running
        return
    flags = ("--gateway", "fake", "--workers", "50")
    with boot(directory, *flags, **LIMITS, shutdown_grace=0.1) as server:
        yield server


@pytest.fixture
def booted(server: Serving) -> Booted:
    """The server, where it is for development."""
    assert isinstance(server, Booted)
    return server


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[ZenRowsBatchClient]:
    with open_client(server) as client:
        yield client


@pytest.fixture
def caller(server: Serving) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


def make(caller: Caller, document: Json) -> Json:
    """A slot; the answer."""
    response = caller.http.post("/job_inputs", json=document)
    assert response.status_code == 201, response.text
    return as_json(response)


def put(slot: Json, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    """Send a file as the answer said, but for `headers`, with nothing else of the caller's."""
    upload = slot["upload"]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(
        upload["method"],
        upload["url"],
        content=content,
        headers={**upload["headers"], **named},
        trust_env=False,
        verify=False,  # plain HTTP on loopback, and loading certificates takes long
    )


def filled(caller: Caller, document: Json, content: bytes) -> Json:
    """A slot with a file in it; the answer that made it."""
    slot = make(caller, document)
    response = put(slot, content)
    assert (response.status_code, response.content) == (200, b""), response.text
    return slot


def submit(caller: Caller, slot: Json, **fields: Any) -> httpx.Response:
    """Submit the file in a slot; whatever comes back."""
    return caller.http.post("/jobs", json={"file_input_id": slot["file_input_id"], **fields})


def rows_of(caller: Caller, slot: Json, *, status: int = 201) -> list[Json]:
    """Submit the file in a slot, and the rows once all of it has been scraped."""
    response = submit(caller, slot)
    assert response.status_code == status, response.text
    job = as_json(response)
    assert caller.wait(job)["status"] == "completed"
    return caller.results(job, limit=1_000)


def jobs_of(caller: Caller) -> list[str]:
    """The ids of the caller's jobs."""
    return [job["job_id"] for job in caller.get("/jobs", limit=100)["jobs"]]


def table(count: int, delimiter: str = ",") -> bytes:
    """A CSV file with a header: an id, a note with a line feed in it, a URL."""
    lines = [
        f'id-{number}{delimiter}"a\n""b"""{delimiter}{target(str(number))}'
        for number in range(count)
    ]
    return "\r\n".join([delimiter.join(["id", "note", "url"]), *lines, ""]).encode()


def test_the_public_client_uploads_and_submits(client: ZenRowsBatchClient, tmp_path: Path) -> None:
    fields: dict[str, int | str] = {"url": "url", "external_id": "id"}
    file = tmp_path / "tasks.csv"
    file.write_bytes(table(5, ";"))

    file_input_id = client.upload_csv(file, fields=fields, header=True, delimiter=";")
    job = client.submit_regular(file_input_id=file_input_id)
    finish(job)

    rows = list(job.run.results())
    assert job.accepted_tasks == 5
    assert urls(rows) == [target(str(number)) for number in range(5)]
    assert [row.external_id for row in rows] == [f"id-{number}" for number in range(5)]


def test_a_large_file_is_ingested_after_the_answer(client: ZenRowsBatchClient) -> None:
    content = "".join(f"'{target(str(number))}'\n" for number in range(LARGE_FROM)).encode()

    file_input_id = client.upload_csv(io.BytesIO(content), fields={"url": 0}, quote="'")
    job = client.submit_job(
        {"type": "regular", "file_input_id": file_input_id}, wait_for_ingest=True
    )

    assert job.run.load().data.ingest_status is IngestStatus.DONE
    finish(job)
    assert urls(job.run.results()) == [target(str(number)) for number in range(LARGE_FROM)]


def test_the_public_client_is_told_what_is_wrong(client: ZenRowsBatchClient) -> None:
    def send_too_much() -> None:
        file_input_id = client.upload_csv(io.BytesIO(b"x" * (MAX_BYTES + 1)), fields={"url": 0})
        # The store of a fleet took it: a presigned link is bound to no length.
        client.submit_regular(file_input_id=file_input_id)

    with pytest.raises(BatchAPIError) as caught:
        send_too_much()
    assert caught.value.status_code == 413
    refused(
        Code.INVALID_ARGUMENT,
        400,
        lambda: client.upload_csv(io.BytesIO(b"a"), fields={"url": "url"}),
    )
    empty = client.create_job_input({"type": "csv", "csv": {"fields": {"url": 0}}})
    refused(
        Code.FILE_INPUT_NOT_UPLOADED,
        409,
        lambda: client.submit_regular(file_input_id=empty.file_input_id),
    )
    refused(Code.FILE_INPUT_NOT_FOUND, 404, lambda: client.submit_regular(file_input_id=NOWHERE))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "urls"])
def test_every_type_plain_and_packed(caller: Caller, kind: str, packed: bool) -> None:
    wanted = [target(f"{kind}/{number}") for number in range(3)]
    post = {"url": wanted[1], "method": "POST", "body": {"q": 1}, "external_id": "p"}
    lines = [json.dumps({"url": wanted[0]}), json.dumps(post), json.dumps({"url": wanted[2]})]
    document, content = {
        "csv": (BY_INDEX, "\ufeff" + "\r\n\r\n".join(wanted)),
        "jsonl": (JSONL, "\n".join(lines)),
        "urls": (URLS, "\n\n".join(["# a comment", *wanted, ""])),
    }[kind]
    file = content.encode()

    rows = rows_of(caller, filled(caller, document, gzip.compress(file) if packed else file))

    assert [row["url"] for row in rows] == wanted
    assert [row.get("method") for row in rows] == [None, "POST" if kind == "jsonl" else None, None]


def test_the_last_upload_before_the_submit_counts(caller: Caller) -> None:
    slot = filled(caller, URLS, b"http://fake.test/first\n")
    assert put(slot, b"http://fake.test/second\n").status_code == 200
    job = as_json(submit(caller, slot))
    assert put(slot, b"http://fake.test/third\nhttp://fake.test/fourth\n").status_code == 200

    assert caller.wait(job)["stats"]["total"] == 1
    assert [row["url"] for row in caller.results(job)] == ["http://fake.test/second"]
    assert len(rows_of(caller, slot)) == 2


def test_a_slot_is_its_makers_own(server: Serving, caller: Caller) -> None:
    slot = filled(caller, URLS, GOOD["urls"])

    with Caller(server.api, "somebody-else") as other:
        problem_of(submit(other, slot), status=404, code="file_input_not_found")
    assert len(rows_of(caller, slot)) == 1


@pytest.mark.development_only("a fleet's files go straight to its store")
def test_another_content_type_is_refused(caller: Caller) -> None:
    slot = filled(caller, URLS, GOOD["urls"])

    for sent in ("text/csv", "text/plain; charset=utf-8", "application/gzip"):
        problem = problem_of(
            put(slot, b"", Content_Type=sent), status=403, code="permission_denied"
        )
        assert "Content-Type: text/plain" in problem["detail"]

    assert len(rows_of(caller, slot)) == 1


@pytest.mark.development_only("a fleet's files go straight to its store")
def test_a_file_may_be_larger_than_other_requests_but_not_too_large(
    booted: Booted, caller: Caller
) -> None:
    slot = filled(caller, URLS, b"\n" * (MAX_BYTES - len(GOOD["urls"])) + GOOD["urls"])
    sent = 0

    def without_end() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * MAX_BYTES:
            sent += 10_000
            yield b"x" * 10_000

    announced = put(slot, b"x" * (MAX_BYTES + 1))
    problem = problem_of(announced, status=413, code="payload_too_large")
    assert "CONVEYOR_MAX_INPUT_BYTES" in problem["detail"]
    problem_of(put(slot, without_end()), status=413, code="payload_too_large")

    assert MAX_BYTES > MAX_REQUEST
    assert temporary_files(booted.data_dir) == []
    assert len(rows_of(caller, slot)) == 1


@pytest.mark.development_only("a fleet's files go straight to its store")
def test_an_announced_excess_is_not_even_asked_for(booted: Booted, caller: Caller) -> None:
    url = httpx.URL(make(caller, URLS)["upload"]["url"])
    head = (
        f"PUT {url.raw_path.decode()} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
        f"Expect: 100-continue\r\nContent-Length: {MAX_BYTES + 1}\r\n\r\n"
    )

    [answer] = answers_to(booted.port, head.encode())

    assert answer.status_code == 413


@pytest.mark.development_only("a fleet's files go straight to its store")
def test_an_upload_that_breaks_off_changes_nothing(booted: Booted, caller: Caller) -> None:
    slot = filled(caller, URLS, GOOD["urls"])
    url = httpx.URL(slot["upload"]["url"])
    head = (
        f"PUT {url.raw_path.decode()} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {MAX_BYTES}\r\n\r\n"
    )

    answers_to(booted.port, head.encode() + b"x" * (MAX_BYTES - 1), hang_up=True)

    eventually(lambda: not temporary_files(booted.data_dir) or None, "nothing is left over")
    assert len(rows_of(caller, slot)) == 1


def lines_of(count: int) -> bytes:
    """So many URLs, one a line."""
    return "".join(f"{target(str(number))}\n" for number in range(count)).encode()


BAD_FILES: dict[str, tuple[Json, bytes, int, tuple[str, ...]]] = {
    "empty": (URLS, b"", 400, ("no task",)),
    "blank lines and comments": (URLS, b"\n# nothing\n\n", 400, ("no task",)),
    "header alone": (BY_NAME, b"url\n", 400, ("no task",)),
    "header missing": (BY_NAME, b"", 400, ("header",)),
    "column missing": (BY_NAME, b"id,address\n1,http://a.test/\n", 400, ('"url"', '"address"')),
    "column twice": (BY_NAME, b"url,url\nhttp://a.test/,b\n", 400, ('2 columns "url"',)),
    "too few columns": (
        WITH_ID,
        b"http://a.test/,a\n\nhttp://b.test/\n",
        400,
        ("record 2 at line 3", "too few columns"),
    ),
    "unbalanced quote": (
        BY_INDEX,
        b'"http://a.test/","two\nlines"\n\nhttp://b.test/,"never closed\nx\n',
        400,
        ("record 2", "line 4"),
    ),
    "text after a quote": (
        BY_INDEX,
        b'http://a.test/\n"http://b.test/"x\n',
        400,
        ("record 2", "line 2"),
    ),
    "bad URL in a record": (
        WITH_ID,
        b'http://a.test/,a\nhttp://b.test/,"b"\nftp://c.test/,c\n',
        400,
        ("1 of 3", "record 3 at line 3", "unsupported_scheme"),
    ),
    "bad external id": (
        WITH_ID,
        b"http://a.test/,a b\n",
        400,
        ("record 1 at line 1", "invalid_external_id"),
    ),
    "UTF-16": (BY_INDEX, "http://a.test/\n".encode("utf-16"), 400, ("UTF-16", "UTF-8")),
    "UTF-16 without a mark": (URLS, "http://a.test/\n".encode("utf-16-le"), 400, ("UTF-16",)),
    "not UTF-8": (URLS, b"http://a.test/\nhttp://b.test/\xff\n", 400, ("line 2", "UTF-8")),
    "no JSON in a line": (
        JSONL,
        b'{"url": "http://a.test/"}\n\n{"url": \n',
        400,
        ("record 2 at line 3", "not JSON"),
    ),
    "no object in a line": (JSONL, b'["http://a.test/"]\n', 400, ("record 1 at line 1",)),
    "a task that is none": (
        JSONL,
        b'{"url": "http://a.test/"}\n{"url": "http://b.test/", "method": "PATCH"}\n',
        400,
        ("record 2 at line 2", "unsupported_method"),
    ),
    "bad URL in a list": (
        URLS,
        b"# list\nhttp://a.test/\nnonsense\n",
        400,
        ("record 2 at line 3", "malformed_url"),
    ),
    "too many tasks": (URLS, lines_of(MAX_ROWS + 1), 400, ("CONVEYOR_MAX_INPUT_ROWS", "60")),
    "gzip bomb": (
        URLS,
        gzip.compress(b"\n" * 30_000_000),
        413,
        ("unpacks to more than 40,000", "CONVEYOR_MAX_INPUT_BYTES"),
    ),
    "gzip cut off": (URLS, gzip.compress(lines_of(30))[:-9], 400, ("gzip", "cut off")),
    "gzip damaged": (URLS, gzip.compress(lines_of(30))[:20] + b"\xff" * 40, 400, ("gzip",)),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_creates_nothing_and_can_be_replaced(
    server: Serving, caller: Caller, name: str
) -> None:
    document, content, status, words = BAD_FILES[name]
    slot = filled(caller, document, content)
    before, files = jobs_of(caller), len(bodies(server, ""))

    response = submit(caller, slot)

    code = "payload_too_large" if status == 413 else "invalid_argument"
    detail = problem_of(response, status=status, code=code)["detail"]
    assert [word for word in words if word not in detail] == [], detail
    assert jobs_of(caller) == before
    assert len(bodies(server, "")) == files
    good = GOOD[document["type"]]
    if document is BY_NAME:
        good = b"id,url\n1,http://fake.test/good\n"
    assert put(slot, good).status_code == 200
    assert [row["url"] for row in rows_of(caller, slot)] == ["http://fake.test/good"]


def test_bad_tasks_are_listed(caller: Caller) -> None:
    slot = filled(caller, URLS, b"http://a.test/\nhttp://user:secret@\nftp://b.test/\n")

    response = submit(caller, slot)

    problem = problem_of(response, status=400, code="invalid_argument")
    assert [task["index"] for task in problem["invalid_tasks"]] == [1, 2]
    assert "secret" not in response.text
