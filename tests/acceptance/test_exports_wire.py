"""Exports of a real server: the public client's whole flow, and kill -9 in the middle of one."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch import BatchAPIError, ZenRowsBatchClient
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import ExportStatus

from conveyor.gateway.fake import expected_body
from tests.acceptance.support_bindings import FLEET, Serving, bodies
from tests.acceptance.support_boot import Booted
from tests.acceptance.support_client import (
    NOWHERE,
    client_server,
    finish,
    open_client,
    refused,
)
from tests.acceptance.support_data import rows_left, rows_of, server, temporary_files
from tests.acceptance.support_wire import Wire, eventually, target
from tests.patient import fetched

pytestmark = pytest.mark.server

TASKS = 5_000
"""So many that an export takes seconds, and its bytes are written bit by bit."""


@pytest.fixture(scope="module")
def booted(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    if binding == FLEET:
        yield request.getfixturevalue("shared_fleet")
        return
    with client_server(tmp_path_factory.mktemp("exports")) as booted:
        yield booted


@pytest.fixture(scope="module")
def client(booted: Serving) -> Iterator[ZenRowsBatchClient]:
    with open_client(booted) as client:
        yield client


def exported(booted: Serving, job_id: str) -> list[str]:
    """The files of the exports of a job."""
    return [key for key in bodies(booted, job_id) if key.startswith("exports/")]


def manifest_of(path: Path) -> list[Any]:
    """Return the rows in the manifest of an archive, after checking every body in it."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        rows = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        for row in rows:
            if row["status"] == "successful":
                assert archive.read(row["file"]) == expected_body(row["url"])
    assert subprocess.run(["unzip", "-tq", path], capture_output=True).returncode == 0
    return rows


def test_the_client_exports_a_run(client: ZenRowsBatchClient, tmp_path: Path) -> None:
    job = client.submit_regular(
        [
            {"url": target("first"), "external_id": "CON"},
            {"url": target("second"), "external_id": "page", "metadata": {"shop": "north"}},
            {"url": target("third"), "external_id": "Page"},
            {"url": target("gone", status=404), "external_id": "gone"},
        ]
    )
    finish(job)
    run = job.run.load()

    started = client.start_results_export(job.job_id, run.run_id)
    assert started.start_response is not None
    lifetime = started.start_response.expires_at - started.start_response.created_at
    assert lifetime.total_seconds() == 12 * 3_600
    ended = client.wait_for_export(
        job.job_id, run.run_id, started.export_id, timeout=30, poll_interval=0.05
    )
    assert ended.status is ExportStatus.COMPLETED
    assert ended.error is None
    path = started.download_to_path(tmp_path / "by-ref.zip")

    rows = manifest_of(path)
    assert [row.get("file") for row in rows] == ["_CON.html", "page.html", "Page (2).html", None]
    assert [row["status"] for row in rows] == ["successful"] * 3 + ["failed"]
    assert rows[3]["error"]["code"]
    assert rows[1]["metadata"] == {"shop": "north"}
    again = client.download_all_results(
        job.job_id, run.run_id, tmp_path / "at-once.zip", poll_interval=0.05
    )
    assert manifest_of(again) == rows
    missing = client.run(job.job_id, run.run_id).export(NOWHERE)
    refused(Code.NOT_FOUND, 404, missing.load)


@pytest.mark.guarantee("G10")
def test_a_deleted_run_has_no_export_and_leaves_no_file(
    client: ZenRowsBatchClient, booted: Serving
) -> None:
    job = client.submit_regular([target("deleted")])
    finish(job)
    export = job.run.load().start_export().wait(timeout=30, poll_interval=0.05)
    link = str(export.data.download_url)
    assert len(exported(booted, job.job_id)) == 1

    job.delete()

    with pytest.raises(BatchAPIError) as missing:
        export.load()
    assert missing.value.status_code == 404
    if isinstance(booted, Booted):
        # A fleet's link goes to the store, which knows of no job.
        assert fetched(link).status_code == 404
    eventually(lambda: exported(booted, job.job_id) == [] or None, "the export's file is gone")
    assert fetched(link).status_code == 404
    if not isinstance(booted, Booted):
        return
    count = "SELECT count(*) FROM exports WHERE job_id = ?"
    data_dir = booted.data_dir
    eventually(
        lambda: rows_of(data_dir, count, job.job_id) == [(0,)] or None, "the export's row is gone"
    )


@pytest.mark.parametrize(
    "kills", [2, pytest.param(10, marks=(pytest.mark.full, pytest.mark.timeout(300)), id="full")]
)
def test_an_export_completes_after_kills_in_the_middle_of_it(tmp_path: Path, kills: int) -> None:
    urls = [target(f"killed/{number}") for number in range(TASKS)]
    flags = ("--gateway", "fake", "--workers", "200")
    with server(tmp_path, *flags) as process, Wire(process.info.api) as wire:
        job_id = wire.submit(urls, max_inflight=1_000)["job_id"]
        run_id = wire.ended(job_id)["run_id"]
        exports = f"/jobs/{job_id}/runs/{run_id}/exports"
        export_id = wire.ask("POST", exports)["export_id"]
        wait_until_half_made(wire, tmp_path, f"{exports}/{export_id}")
    cut_off = int(was_cut_off(tmp_path, export_id))
    while cut_off < kills:
        with server(tmp_path, *flags) as process, Wire(process.info.api) as wire:
            if is_completed(wire, f"{exports}/{export_id}"):
                # The machine was too busy for the kill to come in the middle.
                export_id = wire.ask("POST", exports)["export_id"]
            wait_until_half_made(wire, tmp_path, f"{exports}/{export_id}")
        cut_off += was_cut_off(tmp_path, export_id)

    with server(tmp_path, *flags) as process, Wire(process.info.api) as wire:

        def completed() -> Any:
            export = wire.ask("GET", f"{exports}/{export_id}")
            assert export["status"] != "failed", export
            return export if export["status"] == "completed" else None

        export = eventually(completed, "the export completes")
        archive = tmp_path / "export.zip"
        archive.write_bytes(fetched(export["download_url"]).content)
        assert temporary_files(tmp_path) == []
    rows = manifest_of(archive)
    assert [row["url"] for row in rows] == urls
    assert {row["status"] for row in rows} == {"successful"}


def wait_until_half_made(wire: Wire, data_dir: Path, export: str) -> None:
    """Return while an export is being written: some of its bytes are there, and not all. Also where
    that was missed."""
    deadline = time.monotonic() + 60
    looked = 0
    while not any(size_of(path) > 0 for path in temporary_files(data_dir)):
        assert time.monotonic() < deadline, "no export was begun"
        looked += 1
        if looked % 1_000 == 0 and is_completed(wire, export):
            return


def is_completed(wire: Wire, export: str) -> bool:
    """Return whether an export is complete, by its path."""
    status: str = wire.ask("GET", export)["status"]
    return status == "completed"


def size_of(path: Path) -> int:
    """Of a file that may have been put into its place since it was listed; then nothing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def was_cut_off(data_dir: Path, export_id: str) -> bool:
    """Return whether the server died in the middle of an export."""
    status = "SELECT status FROM exports WHERE export_id = ?"
    return rows_left(data_dir, status, export_id) == [("running",)]
