"""Files of tasks that are refused: each names what is wrong and where, and creates nothing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest

from tests.acceptance.support_bindings import Serving, bodies
from tests.acceptance.support_calls import Caller, Json, problem_of
from tests.acceptance.support_file_inputs import (
    BY_INDEX,
    GOOD,
    JSONL,
    MAX_ROWS,
    URLS,
    filled,
    put,
    rows_of,
    submit,
    taking_files,
)
from tests.acceptance.support_wire import target

BY_NAME: Json = {"type": "csv", "csv": {"header": True, "fields": {"url": "url"}}}
WITH_ID: Json = {"type": "csv", "csv": {"fields": {"url": 0, "external_id": 1}}}


@pytest.fixture(scope="module")
def server(binding: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with taking_files(binding, tmp_path_factory.mktemp("inputs")) as server:
        yield server


@pytest.fixture
def caller(server: Serving) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


def jobs_of(caller: Caller) -> list[str]:
    """The ids of the caller's jobs."""
    return [job["job_id"] for job in caller.get("/jobs", limit=100)["jobs"]]


def lines_of(count: int) -> bytes:
    """Return `count` URLs, one a line."""
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


@pytest.mark.guarantee("G1")
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
