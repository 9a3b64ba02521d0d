"""A request body is JSON as the standard has it, within the limits, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, problem_of

GOOD = "http://good.invalid/"
REQUEST_BYTES = 50_331_648
SMALL_REQUEST_BYTES = 4_096
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("json")
    with boot(directory, "--gateway", "fake", "--log-level", "warning") as server:
        yield server
        assert b"Traceback" not in server.output()


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("small")
    with boot(directory, "--gateway", "fake", max_request_bytes=SMALL_REQUEST_BYTES) as server:
        yield server


@pytest.fixture
def caller(server: Booted) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


def document(**fields: Any) -> bytes:
    return json.dumps({"tasks": [{"url": GOOD}], **fields}).encode()


def nested(depth: int) -> bytes:
    """A submit whose innermost array lies so many levels deep."""
    inner = depth - 3
    body = b"[" * inner + b"]" * inner
    return b'{"tasks":[{"url":"%b","method":"POST","body":%b}]}' % (GOOD.encode(), body)


NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "white space": b" \r\n\t",
    "a byte order mark": b"\xef\xbb\xbf" + document(),
    "invalid UTF-8": document(name="x").replace(b'"x"', b'"\xff"'),
    "UTF-16": document().decode().encode("utf-16"),
    "an overlong encoding": document(name="x").replace(b'"x"', b'"\xc0\xaf"'),
    "an encoded surrogate": document(name="x").replace(b'"x"', b'"\xed\xa0\x80"'),
    "a lone surrogate": document(name="\ud800"),
    "surrogates the wrong way round": document(name="\udc00\ud800"),
    "a control character": document(name="x").replace(b'"x"', b'"\x01"'),
    "NaN": document(priority=float("nan")),
    "Infinity": document(priority=float("inf")),
    "minus Infinity": document(priority=float("-inf")),
    "a number too large for a double": document(priority=0).replace(b": 0", b": 1e999"),
    "a number of many digits": document(priority=0).replace(b": 0", b": " + b"9" * 400),
    "a number of very many digits": document(priority=0).replace(b": 0", b": " + b"9" * 40_000),
    "a leading zero": document(priority=0).replace(b": 0", b": 01"),
    "a comma too many": b'{"tasks":[{"url":"http://good.invalid/"},]}',
    "single quotes": b"{'tasks':[]}",
    "two documents": document() + document(),
    "half a document": document()[:-1],
    "a key twice": b'{"tasks":[{"url":"http://good.invalid/","url":"http://good.invalid/"}]}',
    "a key twice, once escaped": b'{"name":"a","n\\u0061me":"b","tasks":[]}',
    "33 levels": nested(33),
    "a million brackets": b"[" * 1_000_000,
    "a million objects": b'{"a":' * 1_000_000,
    "an array": b"[]",
    "text": b'"tasks"',
    "null": b"null",
    "a number": b"1",
    "true": b"true",
    "a form": b"tasks=1&tasks=2",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_submit_is_refused(caller: Caller, body: bytes) -> None:
    job = caller.submit(status="open")
    for path in ("/jobs", f"/jobs/{job['job_id']}/tasks"):
        response = caller.http.post(path, content=body, headers=JSON_TYPE)
        problem_of(response, status=400, code="invalid_argument")
        assert len(response.content) < 1_000


def test_what_is_odd_and_json_is_taken(caller: Caller) -> None:
    for body in (
        nested(32),
        b" \n" + document() + b"\r\n\t ",
        document(name="\U0001f600").replace(b"\\ud83d\\ude00", "\U0001f600".encode()),
        document(name="\U0001f600"),
        document(unknown={"a": [1.5e300, -0.0]}, external_id=None, metadata=None),
        document(priority=5, max_inflight=10_000, max_attempts=10, result_ttl_days=365),
    ):
        response = caller.http.post("/jobs", content=body, headers=JSON_TYPE)
        assert response.status_code == 201, response.text
        caller.http.post(f"/jobs/{response.json()['job_id']}/stop")


VALUES: dict[str, Any] = {
    "text": "words",
    "empty text": "",
    "whole": 3,
    "minus": -1,
    "fraction": 1.5,
    "huge": 10**300,
    "true": True,
    "list": [1],
    "empty list": [],
    "object": {"a": {"b": 1}},
    "empty object": {},
}
SUBMIT_FIELDS: dict[str, set[str]] = {
    "type": set(),
    "status": set(),
    "tasks": set(),
    "zenrows_params": {"empty object"},
    "external_id": {"text"},
    "name": {"text", "empty text"},
    "metadata": {"empty object"},
    "max_inflight": {"whole"},
    "priority": {"whole"},
    "max_attempts": {"whole"},
    "result_ttl_days": {"whole"},
    "async": set(),
    "file_input_id": set(),
    "webhook": set(),
    "schedule": set(VALUES),
    "callback": set(),
    "politeness": {"empty object"},
}
"""Each field, and those of VALUES that it takes."""


def test_every_field_refuses_every_wrong_type(caller: Caller) -> None:
    for name, takes in SUBMIT_FIELDS.items():
        for kind, value in VALUES.items():
            response = caller.http.post("/jobs", json=json.loads(document(**{name: value})))
            if kind in takes:
                assert response.status_code == 201, (name, kind, response.text)
                caller.http.delete(f"/jobs/{response.json()['job_id']}")
            elif (name, kind) == ("async", "true"):
                assert response.status_code == 202, response.text
                caller.http.delete(f"/jobs/{response.json()['job_id']}")
            else:
                problem = problem_of(response, status=400, code="invalid_argument")
                assert name in problem["detail"] or "invalid_tasks" in problem, (name, kind)


def test_every_field_of_an_addition_refuses_every_wrong_type(caller: Caller) -> None:
    job = caller.submit(status="open")
    for name in ("tasks", "last_batch"):
        for kind, value in VALUES.items():
            if (name, kind) != ("last_batch", "true"):
                response = caller.http.post(
                    f"/jobs/{job['job_id']}/tasks", json=json.loads(document(**{name: value}))
                )
                problem_of(response, status=400, code="invalid_argument")
    assert caller.get(f"/jobs/{job['job_id']}")["latest_run"]["stats"]["total"] == 0


def test_one_over_each_limit_is_refused(caller: Caller) -> None:
    large = {"wait_for": "x" * (32_768 - len('{"wait_for":""}'))}
    headers = {"X": "x" * (8_192 - len('{"X":""}'))}
    at_the_limit: list[dict[str, Any]] = [
        {"zenrows_params": large},
        {"zenrows_params": {"custom_headers": headers}},
    ]
    for fields in at_the_limit:
        job = caller.submit(GOOD, **fields)
        caller.http.delete(f"/jobs/{job['job_id']}")
    over: list[dict[str, Any]] = [
        {"name": "n" * 101},
        {"external_id": "e" * 129},
        {"external_id": "e\n"},
        {"metadata": {f"k{n}": "" for n in range(21)}},
        {"metadata": {"k" * 129: ""}},
        {"metadata": {"k": "v" * 1_025}},
        {"zenrows_params": {"wait_for": large["wait_for"] + "x"}},
        {"zenrows_params": {"custom_headers": {"X": headers["X"] + "x"}}},
        {"zenrows_params": {"custom_headers": {f"X-{n}": "" for n in range(33)}}},
        {"zenrows_params": {"wait": 30_001}},
        {"max_inflight": 0},
        {"max_inflight": 10_001},
        {"priority": -1},
        {"priority": 10},
        {"max_attempts": 0},
        {"max_attempts": 11},
        {"result_ttl_days": 0},
        {"result_ttl_days": 366},
        {"politeness": {"per_host": 1_001}},
        {"politeness": {"per_host_rate": 0.009}},
        {"tasks": [{"url": GOOD}] * 100_001},
        {"tasks": []},
    ]
    for fields in over:
        response = caller.http.post("/jobs", json={"tasks": [{"url": GOOD}], **fields})
        problem_of(response, status=400, code="invalid_argument")
    open_job = caller.submit(status="open")
    response = caller.http.post(
        f"/jobs/{open_job['job_id']}/tasks", json={"tasks": [{"url": GOOD}] * 10_001}
    )
    problem_of(response, status=400, code="invalid_argument")
    response = caller.http.post("/jobs", json={"tasks": [{"url": GOOD}] * 10_000})
    assert (response.status_code, response.json()["accepted_tasks"]) == (202, 10_000)
    caller.http.delete(f"/jobs/{response.json()['job_id']}")


def in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1_000_000):
        yield body[start : start + 1_000_000]


@pytest.mark.parametrize(
    "kind", [pytest.param("small"), pytest.param("real", marks=pytest.mark.timeout(180))]
)
def test_the_limit_of_a_request_body_is_exact(
    server: Booted, small_server: Booted, kind: str
) -> None:
    tried, limit = {
        "small": (small_server, SMALL_REQUEST_BYTES),
        "real": (server, REQUEST_BYTES),
    }[kind]
    fits = document().ljust(limit)
    sendings: list[Callable[[bytes], bytes | Iterator[bytes]]] = [bytes, in_pieces]
    with Caller(tried.api) as caller:
        for sending in sendings:
            taken = caller.http.post("/jobs", content=sending(fits), headers=JSON_TYPE)
            assert taken.status_code == 201, taken.text
            caller.http.delete(f"/jobs/{taken.json()['job_id']}")
            refused = caller.http.post("/jobs", content=sending(fits + b" "), headers=JSON_TYPE)
            problem_of(refused, status=413, code="payload_too_large")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 415),
        ("", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("application/json; charset=utf-16", 415),
        ("text/json", 415),
        ("application/json", 201),
        ("Application/JSON; charset=UTF-8", 201),
        ('application/json;charset="utf-8"', 201),
    ],
)
def test_the_content_type_has_to_be_json(
    caller: Caller, content_type: str | None, status: int
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = caller.http.post("/jobs", content=document(), headers=headers)
    if status == 201:
        assert response.status_code == 201, response.text
    else:
        problem_of(response, status=415, code="unsupported_media_type")


def test_an_encoded_request_body_is_refused(caller: Caller) -> None:
    for coding in ("gzip", "br", "identity, gzip"):
        headers = {**JSON_TYPE, "Content-Encoding": coding}
        response = caller.http.post("/jobs", content=document(), headers=headers)
        problem_of(response, status=415, code="unsupported_media_type")


@pytest.mark.parametrize("key", ["k" * 129, "", "ä" * 129])
def test_an_idempotency_key_that_is_none_is_refused(caller: Caller, key: str) -> None:
    headers = {**JSON_TYPE, "Idempotency-Key": key.encode()}
    response = caller.http.post("/jobs", content=document(), headers=headers)  # type: ignore[arg-type]
    problem_of(response, status=400, code="invalid_argument")
