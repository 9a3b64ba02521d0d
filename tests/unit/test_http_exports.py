"""Exports over HTTP: asked for, fetched by their links, refused, and gone after their time."""

from __future__ import annotations

import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.disk import files_below
from tests.unit.export_world import handler, made, manifest, never, path_of, received, start, state
from tests.unit.http_api import PAGE, Api, open_api, problem_of

NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.mark.slow
async def test_an_export_is_asked_for_made_and_fetched(api: Api) -> None:
    job = await api.submit(300)
    await api.drain(job, failing=2)

    response = await made(api, job)

    headers = response.headers
    assert headers["Content-Type"] == "application/zip"
    assert headers["Content-Length"] == str(len(response.content))
    run_id = job["latest_run"]["run_id"]
    assert headers["Content-Disposition"] == f'attachment; filename="{run_id}.zip"'
    assert headers["X-Content-Type-Options"] == "nosniff"
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        rows = manifest(archive)
        assert [row["status"] for row in rows] == ["failed"] * 2 + ["successful"] * 298
        assert {archive.read(row["file"]) for row in rows[2:]} == {PAGE}


@pytest.mark.parametrize(
    ("word", "media_type", "start_of_file"),
    [
        ("zip", "application/zip", b"PK\x03\x04"),
        ("jsonl", "application/x-ndjson", b'{"task_id":"'),
        ("csv", "text/csv; charset=utf-8", b"task_id,"),
        ("parquet", "application/vnd.apache.parquet", b"PAR1"),
    ],
)
async def test_every_format_is_made(
    api: Api, word: str, media_type: str, start_of_file: bytes
) -> None:
    job = await api.submit(3)
    await api.drain(job)
    response = await made(api, job, format=word)
    assert response.headers["Content-Type"] == media_type
    assert response.content.startswith(start_of_file)


async def test_a_link_opens_its_export_alone_and_for_its_time(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    await made(api, job)
    first = await start(api, job)
    await handler(api).handle(await received(api), never)
    link = str((await state(api, job, first)).download_url)
    other = await start(api, job)

    for wrong in (link[:-1] + ("0" if link[-1] != "0" else "1"), link.replace(first, other)):
        problem_of(await api.bare.get(wrong), status=403, code="permission_denied")
    url = urlsplit(link)
    problem_of(await api.bare.get(url.path), status=403, code="permission_denied")
    problem_of(await api.bare.get("/v1/exports/x/y/z"), status=404, code="not_found")
    head = await api.bare.head(link)
    assert head.status_code == 200
    assert int(head.headers["Content-Length"]) > 0
    await api.clock.advance(7_201)
    problem_of(await api.bare.get(link), status=403, code="permission_denied")
    fresh = str((await state(api, job, first)).download_url)
    assert fresh != link
    assert (await api.bare.get(fresh)).status_code == 200


async def test_an_export_is_not_found_after_its_time(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    export_id = await start(api, job)
    await handler(api).handle(await received(api), never)
    await api.clock.advance(43_199)
    link = str((await state(api, job, export_id)).download_url)
    assert (await api.bare.get(link)).status_code == 200
    await api.clock.advance(1)
    gone = await api.client.get(f"{path_of(job)}/{export_id}")
    problem_of(gone, status=404, code="not_found")
    assert (await api.bare.get(link)).status_code in (403, 404)


@pytest.mark.parametrize("loss", ["some bytes", "all"])
async def test_an_export_that_lost_bytes_is_told_as_a_lost_body(api: Api, loss: str) -> None:
    job = await api.submit(1)
    await api.drain(job)
    export_id = await start(api, job)
    await handler(api).handle(await received(api), never)
    link = str((await state(api, job, export_id)).download_url)
    [file] = files_below(api.directory / "blobs" / "exports")
    if loss == "all":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])

    problem = problem_of(await api.bare.get(link), status=410, code="result_expired")

    assert "lost some bytes" in problem["detail"]


async def test_what_is_asked_wrongly_is_refused(api: Api) -> None:
    job = await api.submit(1)
    path = path_of(job)
    problem_of(await api.client.post(f"{path}?format=tar"), status=400, code="invalid_argument")
    problem_of(await api.client.post(path, json={"a": 1}), status=400, code="invalid_argument")
    assert (await api.client.post(path, json={})).status_code == 202
    problem_of(await api.foreign.post(path), status=404, code="not_found")
    elsewhere = f"/v1/jobs/{job['job_id']}/runs/{NOWHERE}/exports"
    problem_of(await api.client.post(elsewhere), status=404, code="not_found")
    for missing in (NOWHERE, "x"):
        problem_of(await api.client.get(f"{path}/{missing}"), status=404, code="not_found")
    export_id = await start(api, job)
    problem_of(await api.foreign.get(f"{path}/{export_id}"), status=404, code="not_found")
    other = await api.submit(1)
    problem_of(await api.client.get(f"{path_of(other)}/{export_id}"), status=404, code="not_found")
