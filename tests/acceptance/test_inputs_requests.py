"""Malformed requests, garbage in paths and queries, wrong methods: a problem document each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conveyor.http.app import V1_ROUTES
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, any_problem_of, problem_of
from tests.acceptance.support_raw import answers_to

DOCUMENT = b'{"tasks":[{"url":"http://good.invalid/"}]}'
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("requests")
    with boot(directory, "--gateway", "fake", "--log-level", "warning") as server:
        yield server
        assert b"Traceback" not in server.output()


@pytest.fixture
def caller(server: Booted) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


HEAD = b"Host: 127.0.0.1\r\nX-API-Key: k\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\n" + HEAD
GET = b"GET /v1/jobs HTTP/1.1\r\n" + HEAD
MALFORMED: dict[str, bytes] = {
    "a negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "a length in words": POST + b"Content-Length: two\r\n\r\n{}",
    "an endless length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": POST
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a length shorter than the body": POST + b"Connection: close\r\nContent-Length: 1\r\n\r\n{}",
    "no length at all": POST + b"Connection: close\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "another method": b"BREW /v1/jobs HTTP/1.1\r\n" + HEAD + b"\r\n",
    "bytes in the path": b"GET /v1/\xff\xfe HTTP/1.1\r\n" + HEAD + b"\r\n",
    "a header with NUL": GET + b"X-Odd: a\x00b\r\n\r\n",
    "a header without a name": GET + b": value\r\n\r\n",
    "a path without end": b"GET /v1/jobs?cursor=" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "a key of bytes": b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-API-Key: \xff\r\n"
    b"Connection: close\r\n\r\n",
    "two keys": GET + b"X-API-Key: l\r\nConnection: close\r\n\r\n",
    "every server": b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_gets_a_problem(server: Booted, sent: bytes) -> None:
    responses = answers_to(server.port, sent)
    assert responses
    for response in responses:
        assert response.status_code in (400, 401, 404), response.content
        any_problem_of(response)


def test_a_request_that_breaks_off_harms_nobody(server: Booted, caller: Caller) -> None:
    for sent in (
        b"",
        b"POST /v1",
        POST,
        POST + b"Content-Length: 100\r\n\r\n" + DOCUMENT,
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n",
    ):
        answers_to(server.port, sent, hang_up=True)
    assert caller.http.get("/jobs").status_code == 200


ODD_IDS = [
    "x",
    "0",
    "-1",
    "null",
    "01ARZ3NDEKTSV4RRFFQ69G5FAV",
    "01arz3ndektsv4rrffq69g5fav",
    "01ARZ3NDEKTSV4RRFFQ69G5FAVX",
    "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
    "ILOU0000000000000000000000",
    "%00",
    "%0A",
    "01ARZ3NDEKTSV4RRFFQ69G5FAV%0A",
    "%ff%fe",
    "..%2f..%2fsecret",
    "%F0%9F%98%80",
    "'%20OR%20'1'='1",
    "a" * 5_000,
]


def test_garbage_in_a_path_is_not_found(caller: Caller) -> None:
    job = caller.submit(status="open")
    run_id = job["latest_run"]["run_id"]
    for path, methods in V1_ROUTES.items():
        for odd in ODD_IDS:
            filled = path.removeprefix("/v1")
            if "{task_id}" in path or "{export_id}" in path:
                filled = filled.replace("{job_id}", job["job_id"]).replace("{run_id}", run_id)
            elif "{run_id}" in path:
                filled = filled.replace("{job_id}", job["job_id"])
            for name in ("job_id", "run_id", "task_id", "export_id"):
                filled = filled.replace(f"{{{name}}}", odd)
            for method in methods if filled != path.removeprefix("/v1") else ():
                response = caller.http.request(
                    method,
                    filled,
                    content=DOCUMENT if path.endswith("/tasks") else None,
                    headers=JSON_TYPE,
                )
                assert any_problem_of(response)["code"] == "not_found", (method, filled)


def test_bad_query_values_are_refused(caller: Caller) -> None:
    job = caller.submit(status="open")
    at = f"/jobs/{job['job_id']}"
    limits = ["limit=0", "limit=-1", "limit=1001", "limit=x", "limit=1.5", "limit=", "limit=%D9%A3"]
    limits += ["limit=1&limit=2", "limit=99999999999999999999", "limit=+1", "limit=1%0A"]
    cursors = ["cursor=x", "cursor=%00", "cursor=%ff", f"cursor={'A' * 5_000}"]
    cursors += ["cursor=a&cursor=b", "cursor=LTE", "cursor=%F0%9F%98%80"]
    statuses = ["status=odd", "status=", "status=SUCCESSFUL", "status=failed&status=all"]
    asked = {
        "/jobs": [*limits, *cursors, *statuses, "limit=101", "type=odd", "type="],
        f"{at}/runs": [*limits, *cursors, "limit=101"],
        f"{at}/results": [*limits, *cursors, *statuses, "status=pending"],
        f"{at}/runs/{job['latest_run']['run_id']}/results": [*limits, *cursors, *statuses],
    }
    for path, queries in asked.items():
        for query in queries:
            problem = problem_of(
                caller.http.get(f"{path}?{query}"), status=400, code="invalid_argument"
            )
            assert problem["detail"].startswith(query.partition("=")[0]), query
    for query in ("status=", "status=odd", "status=failed,", "status=failed,odd", "status=,"):
        response = caller.http.post(f"{at}/rerun?{query}")
        problem_of(response, status=400, code="invalid_argument")


OTHER_ROUTES = {("GET", "/v1/webhook/deliveries/replay")}
"""Seemingly wrong methods that are right for a route that takes any name there."""


def test_wrong_methods_name_the_right_ones(caller: Caller) -> None:
    for path, methods in V1_ROUTES.items():
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            if method not in methods and (method, path) not in OTHER_ROUTES:
                response = caller.http.request(method, path.removeprefix("/v1"))
                problem_of(response, status=405, code="method_not_allowed")
                assert set(response.headers["Allow"].split(", ")) - {"HEAD"} == set(methods)
    for path in ("/v1", "/v1/", "/v1/jobs/", "/V1/jobs", "/v1//jobs", "/favicon.ico"):
        response = caller.http.get(caller.http.base_url.join(path))
        problem_of(response, status=404, code="not_found")
