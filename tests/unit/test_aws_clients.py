"""Clients of AWS as a process makes them: connections for all its threads, and links that the
credentials outlast. The credentials are those of a role, which a server hands out as the agent of
a container does."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.boto import BotoCarrier
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.s3.blobs import SHORTEST_LINK, S3Blobs

SERVICES = ("dynamodb", "sqs", "s3", "stepfunctions", "kms")
HOUR, MINUTE = 3_600, 60
ASKED = 2 * HOUR
OPTIONS = AwsOptions(threads=5, receive_threads=7, s3_endpoint="http://127.0.0.1:1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials come from nowhere but where a test puts them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@contextmanager
def role(monkeypatch: pytest.MonkeyPatch, *lasts: int) -> Iterator[None]:
    """A server of credentials, where clients look for one: each answer ends in the next of so many
    seconds, and further ones in the last of them."""
    left = list(lasts)

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seconds = left.pop(0) if len(left) > 1 else left[0]
            end = datetime.now(UTC) + timedelta(seconds=seconds)
            given = {
                "AccessKeyId": "AKIDROLE",
                "SecretAccessKey": "secret",
                "Token": "token",
                "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            body = json.dumps(given).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = server.server_address[1]
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/")
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def bodies() -> AsyncIterator[S3Blobs]:
    """Blobs over clients as a process makes them; S3 itself is never asked."""
    aws = await open_aws(OPTIONS, SystemClock(), "s3")
    try:
        yield S3Blobs(aws, bucket="bodies", clock=SystemClock())
    finally:
        await aws.aclose()


async def links(blobs: S3Blobs, seconds: int) -> tuple[str | None, str | None]:
    """Return the lifetimes of the links for a download and an upload; None if there is no link."""
    found = (
        await blobs.download_link("exports/one", seconds=seconds, file_name="one.zip"),
        await blobs.upload_link("inputs/one", content_type="text/csv", seconds=seconds),
    )
    download, upload = (
        parse_qs(urlsplit(link).query)["X-Amz-Expires"][0] if link else None for link in found
    )
    return download, upload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lasts", "download", "upload"),
    [
        (6 * HOUR, ASKED, ASKED),
        (ASKED - MINUTE, ASKED // 2, None),
        (HOUR - MINUTE, ASKED // 4, None),
        (12 * MINUTE, ASKED // 16, None),
        (SHORTEST_LINK - MINUTE, None, None),
    ],
)
async def test_no_link_is_made_for_longer_than_its_credentials_last(
    monkeypatch: pytest.MonkeyPatch, lasts: int, download: int | None, upload: int | None
) -> None:
    with role(monkeypatch, lasts):
        async with bodies() as blobs:
            told = tuple(None if one is None else str(one) for one in (download, upload))
            assert await links(blobs, ASKED) == told
            # What is asked for a shorter time is not cut down.
            assert await links(blobs, 60) == ("60", "60")


@pytest.mark.slow
async def test_credentials_that_are_about_to_end_are_renewed_before_it_is_asked_how_long_they_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with role(monkeypatch, 12 * MINUTE, 6 * HOUR):
        async with bodies() as blobs:
            assert await links(blobs, ASKED) == (str(ASKED), str(ASKED))


async def test_links_by_credentials_without_an_end_are_as_long_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with bodies() as blobs:
        assert await links(blobs, ASKED) == (str(ASKED), str(ASKED))


async def test_without_credentials_a_link_is_unavailable() -> None:
    async with bodies() as blobs:
        with pytest.raises(ConveyorError, match="no AWS credentials") as caught:
            await links(blobs, ASKED)
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.slow
async def test_there_is_a_connection_for_each_thread_that_may_call_a_service() -> None:
    aws = await open_aws(replace(OPTIONS, carrier="boto"), SystemClock(), *SERVICES)
    try:
        boto = aws.carrier
        assert isinstance(boto, BotoCarrier)
        for service in SERVICES:
            limiters = {boto._limiter(service, "list_things")}
            if service == "sqs":
                limiters.add(boto._limiter(service, "receive_message"))
            threads = sum(limiter.total_tokens for limiter in limiters)
            connections = boto.clients[service].meta.config.max_pool_connections
            assert connections >= threads, service
    finally:
        await aws.aclose()
