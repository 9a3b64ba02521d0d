"""Files of tasks, from the slot to the results: through the public client, and by hand."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from zenrows.batch import BatchAPIError, ZenRowsBatchClient
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import IngestStatus

from tests.acceptance.support_bindings import Serving
from tests.acceptance.support_boot import Booted
from tests.acceptance.support_calls import Caller, as_json, problem_of
from tests.acceptance.support_client import (
    NOWHERE,
    finish,
    open_client,
    refused,
    urls,
)
from tests.acceptance.support_data import temporary_files
from tests.acceptance.support_file_inputs import (
    BY_INDEX,
    GOOD,
    JSONL,
    LARGE_FROM,
    MAX_BYTES,
    MAX_REQUEST,
    URLS,
    filled,
    make,
    put,
    rows_of,
    submit,
    taking_files,
)
from tests.acceptance.support_raw import answers_to
from tests.acceptance.support_wire import eventually, target


@pytest.fixture(scope="module")
def server(binding: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with taking_files(binding, tmp_path_factory.mktemp("inputs")) as server:
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

    # Until all of it has come, or ten seconds are over, the server keeps the connection.
    [answer] = answers_to(booted.port, head.encode(), first=True)

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
