"""Rules for every request: problems, ids, origins, limits, logs, HEAD, the server's routes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http import middleware
from conveyor.http.app import V1_ROUTES
from tests.unit.http_api import KEY, Api, open_api, problem_of

DOCUMENT = b'{"tasks": [{"url": "https://a.test/"}]}'
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", max_request_bytes=1_000) as opened:
        yield opened


@pytest.mark.parametrize("path", ["/v1", "/v2/jobs", "/v1/jobs/", "//v1/jobs", "/v1/jobs/a/b/c"])
async def test_an_unknown_path_is_a_problem(api: Api, path: str) -> None:
    problem = problem_of(
        await api.client.get(f"http://127.0.0.1:9000{path}"), status=404, code="not_found"
    )

    assert problem["type"] == "urn:conveyor:problem:not_found"
    assert set(problem) == {"type", "title", "status", "detail", "code", "instance"}


async def test_a_wrong_method_is_told_the_right_ones(api: Api) -> None:
    for path, handlers in V1_ROUTES.items():
        url = path.format(job_id="x", run_id="x", task_id="x", export_id="x", delivery_id="x")
        response = await api.client.request("PATCH", url)
        problem_of(response, status=405, code="method_not_allowed")
        allowed = set(response.headers["Allow"].split(", ")) - {"HEAD"}
        assert allowed == set(handlers)
    problem_of(await api.client.options("/v1/jobs"), status=405, code="method_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/jsonp"},
        {**JSON, "Content-Encoding": "gzip"},
    ],
)
async def test_a_body_that_does_not_say_it_is_json(api: Api, headers: dict[str, str]) -> None:
    response = await api.client.post("/v1/jobs", content=DOCUMENT, headers=headers)

    problem_of(response, status=415, code="unsupported_media_type")


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'],
)
async def test_a_body_that_says_it_is_json(api: Api, kind: str) -> None:
    response = await api.client.post("/v1/jobs", content=DOCUMENT, headers={"Content-Type": kind})

    assert response.status_code == 201


async def test_a_post_without_a_body_needs_no_type(api: Api) -> None:
    job = await api.submit(1)

    response = await api.client.post(f"/v1/jobs/{job['job_id']}/stop")

    assert "Content-Type" not in response.request.headers
    assert response.status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused(api: Api, announced: bool) -> None:
    fitting = DOCUMENT + b" " * (1_000 - len(DOCUMENT))

    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    def content(body: bytes) -> Any:
        return body if announced else pieces(body)

    fits = await api.client.post("/v1/jobs", content=content(fitting), headers=JSON)
    over = await api.client.post("/v1/jobs", content=content(fitting + b" "), headers=JSON)

    assert fits.status_code == 201
    problem_of(over, status=413, code="payload_too_large")
    assert over.headers["Connection"] == "close"


@pytest.mark.parametrize("unread", [0, 10_000])
async def test_a_body_over_the_limit_is_not_read_to_its_end(
    api: Api, monkeypatch: pytest.MonkeyPatch, unread: int
) -> None:
    monkeypatch.setattr(middleware, "MAX_UNREAD", unread)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 500

    response = await api.client.post("/v1/jobs", content=endless(), headers=JSON)

    problem_of(response, status=413, code="payload_too_large")
    assert read == 3 + unread // 500


async def test_an_unauthenticated_body_is_not_read(api: Api) -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield DOCUMENT

    response = await api.bare.post("/v1/jobs", content=body(), headers=JSON)

    problem_of(response, status=401, code="unauthenticated")
    assert read == 0


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:81", "127.0.0.1:9000", "127.8.8.8", "[::1]:9", "CONVEYOR.test."],
)
async def test_our_own_names_are_served(api: Api, host: str) -> None:
    assert (await api.client.get("/v1/jobs", headers={"Host": host})).status_code == 200


FOREIGN_HOSTS = (
    "evil.test",
    "localhost.evil.test",
    "evil.test:9000",
    "10.0.0.1",
    "[::2]",
    "[::1",
    "a@localhost",
    "localhost/",
    "",
    "xn--",
)


async def test_foreign_names_are_refused(api: Api) -> None:
    for host in FOREIGN_HOSTS:
        for path in ("/v1/jobs", "/healthz", "/nothing"):
            response = await api.client.get(path, headers={"Host": host})
            problem_of(response, status=403, code="permission_denied")


async def test_a_refusal_of_a_host_names_the_setting_in_the_language_of_the_client(
    api: Api,
) -> None:
    host = {"Host": "10.0.0.1:9000"}
    told = problem_of(
        await api.bare.get("/dashboard", headers=host), status=403, code="permission_denied"
    )
    assert "CONVEYOR_ALLOWED_HOSTS" in told["detail"]
    program = await api.bare.get("/v1/jobs", headers={**host, "Accept": "text/html"})
    problem_of(program, status=403, code="permission_denied")
    for path in ("/", "/docs", "/dashboard", "/dashboard/jobs"):
        page = await api.bare.get(path, headers={**host, "Accept": "text/html,*/*;q=0.8"})
        assert page.status_code == 403
        assert page.headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "CONVEYOR_ALLOWED_HOSTS" in page.text
        assert "<code>10.0.0.1:9000</code>" in page.text
    hostile = {"Host": "<b>", "Accept": "text/html"}
    assert "<b>" not in (await api.bare.get("/", headers=hostile)).text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:9000", 200),
        ("HTTP://127.0.0.1:9000", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:9000", 403),
        ("https://evil.test", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_pages_of_other_origins_are_refused(api: Api, origin: str, status: int) -> None:
    response = await api.client.get("/v1/jobs", headers={"Origin": origin})

    assert response.status_code == status
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("field", "ours", "foreign"),
    [
        ("Host", "127.0.0.1:9000", "evil.test"),
        ("Origin", "http://127.0.0.1:9000", "https://evil.test"),
    ],
)
async def test_a_second_host_or_origin_is_judged_like_the_first(
    api: Api, field: str, ours: str, foreign: str
) -> None:
    for values in ((ours, foreign), (foreign, ours), (ours, ours, foreign)):
        response = await api.client.get("/v1/jobs", headers=[(field, value) for value in values])
        problem_of(response, status=403, code="permission_denied")
    twice = await api.client.get("/v1/jobs", headers=[(field, ours)] * 2)

    assert twice.status_code == 200


async def test_the_public_address_is_ours_and_stands_in_links(tmp_path: Path) -> None:
    public = "https://jobs.example/conveyor"
    async with open_api(tmp_path / "data", public_origin=public) as api:
        headers = {"Host": "jobs.example", "Origin": "https://jobs.example"}
        behind_a_proxy = {"Host": "127.0.0.1:9000", "Origin": "https://jobs.example"}
        job = await api.submit(1)
        await api.drain(job)

        served = await api.client.get(f"/v1/jobs/{job['job_id']}/results", headers=headers)
        forwarded = await api.client.get("/v1/jobs", headers=behind_a_proxy)

        assert (served.status_code, forwarded.status_code) == (200, 200)
        assert served.json()["results"][0]["result_url"].startswith(f"{public}/v1/blobs/")


async def test_a_preflight_gets_no_leave(api: Api) -> None:
    response = await api.bare.options(
        "/v1/jobs",
        headers={"Origin": "https://evil.test", "Access-Control-Request-Method": "POST"},
    )

    problem_of(response, status=403, code="permission_denied")


async def test_a_sane_request_id_is_kept_and_another_replaced(api: Api) -> None:
    kept = await api.client.get("/v1/jobs/x", headers={"X-Request-ID": "trace-1.a_B"})
    replaced = [
        await api.client.get("/v1/jobs/x", headers={"X-Request-ID": given})
        for given in ("two words", "x" * 129, "")
    ]

    assert kept.headers["X-Request-ID"] == "trace-1.a_B"
    assert kept.json()["instance"] == "urn:conveyor:request:trace-1.a_B"
    ids = {response.headers["X-Request-ID"] for response in replaced}
    assert len(ids) == 3
    assert all(len(request_id) == 26 for request_id in ids)


async def test_readiness_follows_the_server_and_life_does_not(api: Api) -> None:
    assert (await api.bare.get("/readyz")).json() == {"status": "ready"}
    api.ready[0] = False

    response = await api.bare.get("/readyz")

    problem_of(response, status=503, code="unavailable")
    assert response.headers["Retry-After"] == "1"
    assert (await api.bare.get("/healthz")).json() == {"status": "alive"}


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json", "/v1/jobs", "/v1/no"])
async def test_a_line_feed_that_the_length_counts_ends_every_document(api: Api, path: str) -> None:
    got, head = await api.client.get(path), await api.client.head(path)

    assert got.content.endswith(b"}\n")
    assert int(got.headers["Content-Length"]) == len(got.content)
    assert int(head.headers["Content-Length"]) == len(got.content)


async def test_metrics_are_those_of_the_registry(api: Api) -> None:
    response = await api.bare.get("/metrics")

    assert response.headers["Content-Type"].startswith("text/plain")
    assert "conveyor_things_total 3.0" in response.text


@pytest.mark.guarantee("G16")
async def test_the_log_tells_one_line_a_request_and_no_secret(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    await api.client.get(f"/v1/jobs/x?apikey={KEY}&cursor=c", headers={"X-Request-ID": "r1"})

    [record] = [record for record in caplog.records if record.name == "conveyor.http"]
    fields = {name: getattr(record, name) for name in ("method", "path", "status", "request_id")}
    assert record.getMessage() == "request"
    assert fields == {"method": "GET", "path": "/v1/jobs/x", "status": 404, "request_id": "r1"}
    assert getattr(record, "ms", -1) >= 0
    ours = [str(one.__dict__) for one in caplog.records if one.name.startswith("conveyor")]
    assert not [text for text in ours if KEY in text]


async def test_an_unforeseen_error_is_a_500_that_tells_nothing(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2"

    async def broken(*_args: object, **_more: object) -> None:
        raise RuntimeError(f"it was {secret}")

    monkeypatch.setattr(api.service.listing, "list_jobs", broken)

    response = await api.client.get("/v1/jobs")

    problem = problem_of(response, status=500, code="internal")
    assert "Traceback" not in response.text
    assert secret not in response.text
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.__dict__["error"] == "RuntimeError"
    assert "in broken" in record.__dict__["where"]
    assert secret not in str(record.__dict__)
    assert problem["instance"].endswith(response.headers["X-Request-ID"])


async def test_a_store_that_cannot_answer_is_a_503_to_retry(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_args: object, **_more: object) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is busy", retry_after=2)

    monkeypatch.setattr(api.service.listing, "list_jobs", unavailable)

    response = await api.client.get("/v1/jobs")

    problem_of(response, status=503, code="unavailable")
    assert response.headers["Retry-After"] == "2"


async def test_a_client_that_hangs_up_gets_nothing_done(api: Api) -> None:
    sent: list[Message] = []
    messages: list[Message] = [
        {"type": "http.request", "body": DOCUMENT, "more_body": True},
        {"type": "http.disconnect"},
    ]

    await call(api, messages, sent)

    assert sent == []
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}


async def test_a_write_under_way_survives_the_end_of_its_client(api: Api) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": DOCUMENT},
        {"type": "http.disconnect"},
    ]

    async def gone(_message: Message) -> None:
        raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        await call(api, messages, gone)

    assert len((await api.client.get("/v1/jobs")).json()["jobs"]) == 1


async def call(
    api: Api, messages: list[Message], send: list[Message] | Callable[[Message], Awaitable[None]]
) -> None:
    """Submit by hand, message by message."""

    async def receive() -> Message:
        return messages.pop(0)

    async def note(message: Message) -> None:
        assert isinstance(send, list)
        send.append(message)

    transport = api.client._transport
    assert isinstance(transport, httpx.ASGITransport)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/jobs",
        "raw_path": b"/v1/jobs",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1:9000"),
            (b"x-api-key", KEY.encode()),
            (b"content-type", b"application/json"),
        ],
    }
    await transport.app(scope, receive, note if isinstance(send, list) else send)


BODIES = (
    b"\x00",
    b"\xff\xfe{",
    b"[" * 900,
    json.dumps({"tasks": [{"url": "https://a.test/", "metadata": [1]}]}).encode(),
    b'{"tasks": [{"url": "https://a.test/"}], "metadata": {"a": 1}}',
    b'{"tasks": [{"url": "https://a.test/", "body": {"a": "\\ud800"}, "method": "POST"}]}',
    b'{"tasks": [1e999]}',
    b'{"status": {"open": true}}',
    b'{"last_batch": 1, "tasks": [{"url": "https://a.test/"}]}',
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_no_body_makes_the_server_fail(api: Api, method: str) -> None:
    paths = [path for path, methods in V1_ROUTES.items() if method in methods]

    for body in BODIES:
        job = await api.submit(0, status="open")
        run_id = job["latest_run"]["run_id"]
        for path in paths:
            url = path.format(
                job_id=job["job_id"], run_id=run_id, export_id=run_id, delivery_id=run_id
            )
            response = await api.client.request(method, url, content=body, headers=JSON)
            assert response.status_code not in (500, 503), f"{url}: {response.text}"
