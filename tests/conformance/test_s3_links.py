"""Links of the store's own: uploads and downloads of callers bypass the API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from conveyor.clock import SystemClock
from conveyor.dev.binding import open_binding
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Event, EventKind, Format, StoredBody
from conveyor.domain.task_rules import Succeeded
from conveyor.ports.binding import Binding
from conveyor.ports.exports import ExportFormat
from conveyor.ports.tasks import Claimed
from conveyor.prod.s3.blobs import S3Blobs
from conveyor.records.blob_keys import export_key, input_key, result_key
from conveyor.service import Service, ServiceOptions
from conveyor.service.callers import Caller
from conveyor.service.links import LinkTarget
from conveyor.service.results import Content
from tests.conformance.s3_bucket import empty_bucket
from tests.patient import SECONDS
from tests.webhooks import loopback_webhooks

FILE = b'{"url": "https://site.test/1"}\n{"url": "https://site.test/2"}\n'
MOST = 1_000
ORIGIN = "http://127.0.0.1:9"
UPLOAD_SECONDS = 600


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Fleet:
    """A service whose bodies lie in S3, and a caller's own HTTP client."""

    service: Service
    binding: Binding
    caller: Caller
    http: httpx.AsyncClient

    async def slot(self) -> tuple[str, str, dict[str, str]]:
        """A slot: its id, its link, the headers that it asks for."""
        body = await self.service.inputs.create(self.caller.caller_id, b'{"type": "jsonl"}')
        return body.file_input_id, body.upload.url, body.upload.headers

    async def submit(self, input_id: str) -> int:
        """Submit a file; how many tasks were taken."""
        body = b'{"file_input_id": "%s", "region": "us"}' % input_id.encode()
        given = await self.service.submissions.submit(self.caller, [body], keyed=None)
        accepted: int = json.loads(given.answer.body)["accepted_tasks"]
        return accepted

    async def job(self) -> tuple[str, str]:
        """(job_id, run_id) of a job of one task."""
        given = await self.service.submissions.submit(
            self.caller, [b'{"tasks": [{"url": "https://site.test/"}]}'], keyed=None
        )
        job = json.loads(given.answer.body)
        return job["job_id"], job["latest_run"]["run_id"]

    async def finished_export(self) -> tuple[str, str, str]:
        """(job_id, run_id, export_id) of an export that is complete."""
        job_id, run_id = await self.job()
        started = await self.service.exports.start(
            self.caller.caller_id, job_id, run_id, export_format=ExportFormat.JSONL
        )
        key = export_key(job_id, run_id, started.export_id)
        size = await self.binding.blobs.put(key, b"a line\n")
        exports, now = self.binding.exports, SystemClock().now()
        await exports.begin_export(started.export_id, now=now)
        assert await exports.end_export(started.export_id, size=size, error=None, now=now)
        return job_id, run_id, started.export_id


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    clock = SystemClock()
    opened = await open_binding(tmp_path / "data", clock)
    async with empty_bucket() as (aws, bucket), httpx.AsyncClient(timeout=SECONDS) as http:
        blobs = S3Blobs(aws, bucket=bucket, clock=clock)
        binding = replace(opened.ports, blobs=blobs)
        options = ServiceOptions(
            public_origin=ORIGIN,
            max_input_bytes=MOST,
            input_upload_ttl=UPLOAD_SECONDS,
            result_url_ttl=1_000.0,
            export_ttl=500.0,
        )
        service = Service(binding, options, clock, webhooks=loopback_webhooks(clock))
        caller = service.identify(secrets.token_hex(8))
        yield Fleet(service, binding, caller, http)
    await opened.ports.aclose()


async def test_a_file_goes_to_the_store_itself_and_is_submitted(fleet: Fleet) -> None:
    input_id, link, headers = await fleet.slot()
    assert headers == {"Content-Type": "application/x-ndjson"}
    with pytest.raises(ConveyorError) as caught:
        await fleet.submit(input_id)
    assert caught.value.code is ErrorCode.FILE_INPUT_NOT_UPLOADED
    answer = await fleet.http.put(link, content=FILE, headers=headers)
    assert answer.status_code == 200
    assert await fleet.submit(input_id) == 2


async def test_a_link_takes_its_own_content_type_for_its_own_slot(fleet: Fleet) -> None:
    input_id, link, headers = await fleet.slot()
    other, _, _ = await fleet.slot()
    wrong: list[tuple[str, dict[str, str]]] = [
        (link, {"Content-Type": "text/csv"}),
        (link, {}),
        (link.replace(input_id, other), headers),
        (link.replace(f"Expires={UPLOAD_SECONDS}", "Expires=86400"), headers),
    ]
    for url, given in wrong:
        assert (await fleet.http.put(url, content=FILE, headers=given)).status_code == 403
    for one in (input_id, other):
        assert await fleet.binding.blobs.size(input_key(one)) is None


async def test_a_link_ends_when_the_slot_takes_no_more(fleet: Fleet) -> None:
    _, link, _ = await fleet.slot()
    [seconds] = parse_qs(urlsplit(link).query)["X-Amz-Expires"]
    assert int(seconds) == UPLOAD_SECONDS


@pytest.mark.parametrize("extra", [0, 1])
async def test_a_file_that_is_too_large_is_refused_at_submit(fleet: Fleet, extra: int) -> None:
    input_id, link, headers = await fleet.slot()
    content = FILE.ljust(MOST + extra, b"\n")
    assert (await fleet.http.put(link, content=content, headers=headers)).status_code == 200
    if not extra:
        assert await fleet.submit(input_id) == 2
        return
    with pytest.raises(ConveyorError, match="CONVEYOR_MAX_INPUT_BYTES") as caught:
        await fleet.submit(input_id)
    assert caught.value.code is ErrorCode.PAYLOAD_TOO_LARGE


async def test_the_last_upload_counts_and_one_after_the_submit_changes_nothing(
    fleet: Fleet,
) -> None:
    input_id, link, headers = await fleet.slot()
    for content in (b"not a file of tasks", FILE):
        assert (await fleet.http.put(link, content=content, headers=headers)).status_code == 200
    given = await fleet.submit(input_id)
    await fleet.http.put(link, content=FILE * 3, headers=headers)
    assert given == 2
    [view] = await fleet.binding.jobs.list_jobs(
        fleet.caller.caller_id, status=None, before=None, limit=10
    )
    assert view.latest_run is not None
    assert view.latest_run.stats.total == 2


async def test_an_export_is_fetched_from_the_store_itself(fleet: Fleet) -> None:
    job_id, run_id, export_id = await fleet.finished_export()
    body = await fleet.service.exports.get(fleet.caller.caller_id, job_id, run_id, export_id)
    assert isinstance(body.download_url, str)
    answer = await fleet.http.get(body.download_url)
    assert (answer.status_code, answer.content) == (200, b"a line\n")
    disposition = answer.headers["Content-Disposition"]
    assert disposition == f'attachment; filename="{run_id}.jsonl"'
    tampered = body.download_url.replace(export_id, run_id)
    assert (await fleet.http.get(tampered)).status_code == 403


async def test_a_download_link_lives_no_longer_than_the_export(fleet: Fleet) -> None:
    job_id, run_id, export_id = await fleet.finished_export()
    body = await fleet.service.exports.get(fleet.caller.caller_id, job_id, run_id, export_id)
    [seconds] = parse_qs(urlsplit(body.download_url or "").query)["X-Amz-Expires"]
    assert 400 < int(seconds) < 500


async def test_links_to_results_stay_our_own(fleet: Fleet) -> None:
    """A link of the store's dies with the credentials that signed it, which may be sooner."""
    job_id, run_id = await fleet.job()
    tasks, task_id, now = fleet.binding.tasks, ids.task_id(run_id, 0), SystemClock().now()
    claim = await tasks.claim_task(
        run_id, task_id, worker="w", now=now, claimed_until=now + 60_000, max_interruptions=1
    )
    assert isinstance(claim, Claimed)
    key = result_key(job_id, run_id, task_id, claim.task.claim_number, 30)
    size = await fleet.binding.blobs.put(key, b"<html>")
    attempt = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=now, ended_at=now)
    body = StoredBody(key, size, "text/html", Format.HTML)
    await tasks.settle_task(
        run_id, task_id, claim.task.claim_number, Succeeded(attempt, body), now=now
    )
    page = await fleet.service.results.page(
        fleet.caller.caller_id, job_id, None, status="all", cursor=None, limit=10
    )
    [result] = page.results
    assert isinstance(result.result_url, str)
    assert result.result_url.startswith(f"{ORIGIN}/v1/blobs/{job_id}/{run_id}/{task_id}?")
    link = httpx.URL(result.result_url)
    content = await fleet.service.results.linked_content(
        LinkTarget(job_id, run_id, task_id),
        expires=link.params["expires"],
        signature=link.params["signature"],
    )
    assert isinstance(content, Content)
    assert b"".join([piece async for piece in content.pieces]) == b"<html>"
