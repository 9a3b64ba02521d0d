"""HEAD over a real server: the headers of GET, and not one byte of its body."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from conveyor.testing.local_server import conveyor_server
from tests.patient import SECONDS

VARYING = {"date", "x-request-id", "connection"}
DEADLINE = 60.0


def exchange(origin: str, method: str, path: str, key: str) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and everything else that the server writes until it hangs up."""
    address = urlsplit(origin)
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE) as connection:
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return status, {name: headers[name] for name in headers.keys() - VARYING}, body


@pytest.mark.slow
def test_head_is_get_without_the_body(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data") as server:
        with httpx.Client(
            headers={"X-API-Key": server.api_key}, timeout=SECONDS, trust_env=False
        ) as client:
            tasks = [{"url": server.url("page", size=300_000)}, {"url": server.url(status=404)}]
            job = client.post(f"{server.base_url}/jobs", json={"tasks": tasks}).json()
            server.drain()
            path = f"/v1/jobs/{job['job_id']}"
            rows = client.get(f"{server.base_url}/jobs/{job['job_id']}/results").json()["results"]
        good, bad = (f"{path}/tasks/{row['task_id']}/content" for row in rows)
        link = urlsplit(rows[0]["result_url"])
        paths = {
            "/v1/jobs": "200 ok",
            path: "200 ok",
            good: "200 ok",
            f"{link.path}?{link.query}": "200 ok",
            bad: "422 unprocessable",
            "/v1/jobs/x": "404 not found",
            "/healthz": "200 ok",
            "/openapi.json": "200 ok",
        }
        for asked, expected in paths.items():
            status, headers, body = exchange(server.base_url, "GET", asked, server.api_key)
            answered = exchange(server.base_url, "HEAD", asked, server.api_key)

            assert status.startswith(f"http/1.1 {expected}"), asked
            assert int(headers["content-length"]) == len(body) > 0
            assert answered == (status, headers, b""), asked
