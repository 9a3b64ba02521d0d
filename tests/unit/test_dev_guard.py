"""The guard of /_dev: who is let in, and that no work of a server leads back to it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.settings import load
from conveyor.testing.local_server import ConveyorServer, conveyor_server, serving
from tests.patient import SECONDS

ROOT = Path(__file__).parents[2]
PATHS = [
    ("GET", "/_dev/clock"),
    ("POST", "/_dev/clock"),
    ("POST", "/_dev/reset"),
    ("GET", "/_dev/callbacks"),
    ("GET", "/_dev/gateway/recording"),
    ("DELETE", "/_dev/gateway/recording"),
    ("GET", "/_dev/inbox"),
    ("GET", "/_dev/inbox/shop"),
    ("DELETE", "/_dev/inbox/shop"),
    ("POST", "/_dev/inbox/shop"),
    ("POST", "/_dev/inbox/shop/below"),
]
FOREIGN = [
    {"Host": "conveyor.example"},
    {"Host": "localhost.conveyor.example"},
    {"Origin": "http://page.example"},
    {"Origin": "http://127.0.0.1:1"},
    {"Forwarded": "for=192.0.2.1"},
    {"X-Forwarded-For": "192.0.2.1"},
    {"X-Forwarded-Proto": "https"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    """A server whose API also answers to a name of its own."""
    directory = tmp_path_factory.mktemp("data")
    with conveyor_server(directory, allowed_hosts="conveyor.example") as booted:
        yield booted


def asked(server: ConveyorServer, method: str, path: str, **headers: str) -> httpx.Response:
    """Send a request with the token."""
    origin = server.base_url.removesuffix("/v1")
    body = '{"confirm": "data"}' if path.endswith("reset") else '{"advance": "1s"}'
    return httpx.request(
        method,
        f"{origin}{path}",
        headers={"Authorization": f"Bearer {server.dev_token}", **headers},
        content=body if method == "POST" else None,
        timeout=SECONDS,
        # Loading certificates takes long, and there are none on loopback.
        verify=False,
        trust_env=False,
    )


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_what_comes_from_elsewhere_is_refused_and_nothing_happens(
    server: ConveyorServer, method: str, path: str
) -> None:
    assert asked(server, "POST", "/_dev/inbox/shop").status_code == 204
    for headers in FOREIGN:
        answer = asked(server, method, path, **headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied"), headers
    kept = asked(server, "GET", "/_dev/inbox/shop").json()["requests"]
    assert kept
    assert {request["path"] for request in kept} == {"/"}
    asked(server, "DELETE", "/_dev/inbox/shop")


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_all_but_the_inbox_wants_the_token(server: ConveyorServer, method: str, path: str) -> None:
    answer = asked(server, method, path, Authorization="Bearer 0123456789abcdef0123456789abcdef")
    assert (answer.status_code == 401) is not path.startswith("/_dev/inbox")
    assert answer.status_code in (200, 204, 401)


def test_a_question_for_the_headers_alone_changes_nothing(
    server: ConveyorServer, tmp_path: Path
) -> None:
    for path in ("/_dev/gateway/recording", "/_dev/gateway/requests"):
        answer = httpx.request(
            "HEAD",
            f"{server.base_url.removesuffix('/v1')}{path}",
            headers={"Authorization": f"Bearer {server.dev_token}"},
            json={"record": str(tmp_path / "made")},
            timeout=SECONDS,
        )
        assert answer.status_code == asked(server, "GET", path).status_code
    assert not (tmp_path / "made").exists()


def test_two_names_of_a_host_are_refused(server: ConveyorServer) -> None:
    address = server.base_url.removesuffix("/v1").removeprefix("http://")
    with closing(HTTPConnection(address, timeout=SECONDS)) as connection:
        connection.putrequest("GET", "/_dev/clock", skip_host=True)
        for host in ("127.0.0.1", "conveyor.example"):
            connection.putheader("Host", host)
        connection.putheader("Authorization", f"Bearer {server.dev_token}")
        connection.endheaders()
        assert connection.getresponse().status in (400, 403)


def test_a_token_has_128_bits_and_is_new_at_each_start(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):
        with conveyor_server(tmp_path) as booted:
            tokens.add(booted.dev_token)
    assert [len(bytes.fromhex(token)) for token in tokens] == [16, 16]


def test_production_is_given_neither_a_bench_nor_an_inbox() -> None:
    """The only calls that give them to an application stand in the development bootstrap."""
    given = set()
    for path in sorted((ROOT / "conveyor" / "bootstrap").iterdir()):
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
            given |= {path.name} if names & {"bench", "is_development"} else set()
    assert given == {"development.py"}


@contextmanager
def site(location: str) -> Iterator[str]:
    """Serve a page at /, and a redirect at /away."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/away" else 200)
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answers) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{opened.server_port}"
        finally:
            opened.shutdown()
            thread.join()


def ended(api: str, urls: list[str]) -> dict[str, str]:
    """Submit a job of these URLs; the state of each at its end."""
    from conveyor.clock import SystemClock

    clock = SystemClock()
    with httpx.Client(base_url=api, headers={"X-API-Key": "k"}, timeout=SECONDS) as client:
        tasks = [{"url": url} for url in urls]
        job = client.post("/jobs", json={"tasks": tasks, "max_attempts": 1}).json()["job_id"]
        deadline = clock.monotonic() + SECONDS
        while client.get(f"/jobs/{job}").json()["latest_run"]["status"] != "completed":
            assert clock.monotonic() < deadline
        rows: list[Any] = client.get(f"/jobs/{job}/results").json()["results"]
    return {row["url"]: row["status"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["wire", "aiohttp"])
def test_no_gateway_call_comes_to_its_own_server(tmp_path: Path, engine: str) -> None:
    settings = load(
        {},
        data_dir=str(tmp_path),
        port=0,
        gateway="direct",
        http_engine=engine,
        allow_private=True,
        shutdown_grace=0.0,
    )
    with serving(settings) as (info, _):
        port = info.api.rsplit(":", 1)[1].removesuffix("/v1")
        hosts = ["127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1"]
        with site(f"http://127.0.0.1:{port}/healthz") as other:
            own = [f"http://{host}:{port}/healthz" for host in hosts] + [f"{other}/away"]
            states = ended(info.api, [*own, f"{other}/"])
    assert {url for url, state in states.items() if state == "successful"} == {f"{other}/"}
    assert len(states) == len(own) + 1


@pytest.mark.slow
def test_no_webhook_comes_to_its_own_server_but_to_the_inbox(server: ConveyorServer) -> None:
    origin = server.base_url.removesuffix("/v1")
    by_name = origin.replace("127.0.0.1", "localhost")

    def delivered(url: str) -> bool:
        answer = httpx.post(
            f"{server.base_url}/webhook/test",
            json={"url": url},
            headers={"X-API-Key": server.api_key},
            timeout=SECONDS,
        )
        return answer.status_code == 200 and answer.json().get("delivered", False)

    for start in (origin, by_name):
        for path in ("/v1/jobs", "/_dev/clock", "/_dev/reset", "/_dev/inbox", "/_dev/inboxes/x"):
            assert not delivered(f"{start}{path}"), path
        assert delivered(f"{start}/_dev/inbox/shop/orders")
    assert delivered("https://hooks.example.com/orders")
