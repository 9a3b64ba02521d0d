"""Traces, as a collector of them receives them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from zenrows import ZenRowsBatchClient
from zenrows.batch._typed_dicts import TaskInputDict

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_collector import Collector, attributes, collecting
from tests.acceptance.support_wire import eventually, target
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]

KEY = "a-key-that-nobody-may-see"
FLAGS = ("--gateway", "fake", "--log-level", "warning")
ATTRIBUTES = {
    "job_id", "run_id", "task_id", "export_id", "delivery_id", "attempt", "host", "outcome",
    "bytes", "sent", "reason", "code", "method", "route", "status", "request_id",
}  # fmt: skip


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


def test_each_attempt_is_a_trace_that_links_to_its_submit(
    tmp_path: Path, collector: Collector
) -> None:
    pages: list[str | TaskInputDict] = [
        target(f"secret-path/{number}", status=[200, 404, 503][number % 3]) for number in range(9)
    ]
    with boot(tmp_path, *FLAGS, **traced(collector)) as server:
        with ZenRowsBatchClient(api_key=KEY, base_url=server.api) as client:
            job_id = client.submit_regular(pages).job_id
            finish(server, job_id)
            attempts = calls(server)
        roots = eventually(
            lambda: found if len(found := collector.roots("attempt")) >= attempts else None,
            "a trace of each attempt",
        )

    assert len(roots) == attempts
    assert len({root.trace_id for root in roots}) == attempts
    (submit,) = collector.roots("POST request")
    assert attributes(submit)["route"] == "/v1/jobs"
    for root in roots:
        assert [link.trace_id for link in root.links] == [submit.trace_id]
        names = [part.name for part in collector.parts(root)]
        assert set(names) >= {"claim", "gateway", "settlement"}
        assert ("body" in names) == (attributes(root)["outcome"] == "successful")
        for part in collector.parts(root):
            assert root.start_time_unix_nano <= part.start_time_unix_nano
            assert part.end_time_unix_nano <= root.end_time_unix_nano
    outcomes = [attributes(root)["outcome"] for root in roots]
    assert outcomes.count("successful") == 3
    assert outcomes.count("failed") == 6
    assert outcomes.count("retry") == attempts - 9
    assert collector.paths == {"/v1/traces"}


def test_no_attribute_holds_a_url_a_param_or_a_key(tmp_path: Path, collector: Collector) -> None:
    with boot(tmp_path, *FLAGS, **traced(collector)) as server:
        with httpx.Client(
            base_url=server.api, headers={"X-API-Key": KEY}, timeout=SECONDS
        ) as client:
            body = {
                "tasks": [{"url": target("secret-path") + "#secret-part"}],
                "zenrows_params": {"css_extractor": "secret-extractor", "js_render": "true"},
                "webhook": {
                    "url": f"{server.inbox}/secret-receiver",
                    "signature": False,
                    "events": ["run.completed"],
                },
            }
            made = client.post("/jobs?secret-query=1", json=body)
            assert made.status_code == 201, made.text
            job = made.json()
            finish(server, job["job_id"])
            client.get("/jobs/secret-id?cursor=secret-cursor")
            export = client.post(
                f"/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/exports"
            )
            assert export.status_code == 202
        for name in ("attempt", "delivery", "export", "GET request", "POST request"):
            eventually(partial(some_roots, collector, name), name)

    found = {name for span in collector.all() for name in attributes(span)}
    assert found <= ATTRIBUTES
    assert KEY.encode() not in collector.bytes
    assert b"secret" not in collector.bytes
    assert b"js_render" not in collector.bytes
    hosts = {attributes(root)["host"] for root in collector.roots("attempt")}
    assert hosts == {"fake.test"}


def test_the_same_tasks_are_sampled_by_every_process(tmp_path: Path, collector: Collector) -> None:
    """A server is killed in the middle of a run; the next one traces the same tasks."""
    pages: list[str | TaskInputDict] = [target(f"page/{number}") for number in range(300)]
    settings = traced(collector) | {"trace_ratio": 0.2}
    with (
        boot(tmp_path, *FLAGS, **settings) as server,
        ZenRowsBatchClient(api_key=KEY, base_url=server.api) as client,
    ):
        job_id = client.submit_regular(pages).job_id
        finish(server, job_id)
    first = sampled(collector)
    with boot(tmp_path, *FLAGS, **settings) as server:
        httpx.post(
            f"{server.api}/jobs/{job_id}/rerun",
            headers={"X-API-Key": KEY},
            timeout=SECONDS,
        ).raise_for_status()
        finish(server, job_id)
    again = sampled(collector)

    assert 20 < len(first) < 120
    assert len(collector.roots("attempt")) == 2 * len(first)
    assert again == first
    assert {len(root.links) for root in collector.roots("attempt")} == {1}


def test_a_collector_that_is_away_costs_no_task(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        settings = {"otlp_endpoint": endpoint, "trace_ratio": 1}
        with boot(tmp_path, *FLAGS, **settings) as server:
            with ZenRowsBatchClient(api_key=KEY, base_url=server.api) as client:
                job_id = client.submit_regular([target(f"p/{n}") for n in range(3_000)]).job_id
                finish(server, job_id)
                assert calls(server) == 3_000
            eventually(
                lambda: b"the collector of traces takes none" in server.output() or None,
                "a line about the collector",
            )
            assert server.output().count(b"the collector of traces") == 1


def test_open_metrics_show_the_latest_traces(tmp_path: Path, collector: Collector) -> None:
    with boot(tmp_path, *FLAGS, **traced(collector)) as server:
        with ZenRowsBatchClient(api_key=KEY, base_url=server.api) as client:
            job_id = client.submit_regular([target("page")]).job_id
            finish(server, job_id)
        (root,) = eventually(lambda: collector.roots("attempt") or None, "the trace")
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        shown = httpx.get(f"{server.origin}/metrics", headers=accept, timeout=SECONDS).text
        plain = httpx.get(f"{server.origin}/metrics", timeout=SECONDS).text

    traced_call = re.search(r'conveyor_gateway_calls_total{outcome="successful"} 1.0 # (.*)', shown)
    assert traced_call is not None, shown
    assert f'trace_id="{root.trace_id.hex()}"' in traced_call[1]
    assert "trace_id" not in plain
    assert 'conveyor_gateway_calls_total{outcome="successful"} 1.0\n' in plain


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys, anyio; from conveyor.bootstrap.development import open_dev\n"
        "from conveyor.clock import SystemClock; from conveyor.settings import Settings\n"
        "async def main():\n"
        f"    settings = Settings(data_dir={str(tmp_path / 'data')!r}, gateway='fake')\n"
        "    runtime = await open_dev(settings, SystemClock(), origin='http://127.0.0.1:1')\n"
        "    await runtime.aclose()\n"
        "anyio.run(main)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "[]\n"


def traced(collector: Collector) -> dict[str, object]:
    return {"otlp_endpoint": collector.endpoint, "trace_ratio": 1, "retry_base": 0.01}


def some_roots(collector: Collector, name: str) -> list[Span] | None:
    return collector.roots(name) or None


def sampled(collector: Collector) -> set[str | int]:
    return {attributes(root)["task_id"] for root in collector.roots("attempt")}


def finish(server: Booted, job_id: str) -> None:
    """Wait for the end of the latest run of a job."""
    with httpx.Client(base_url=server.api, headers={"X-API-Key": KEY}, timeout=SECONDS) as client:
        eventually(
            lambda: (
                client.get(f"/jobs/{job_id}").json()["latest_run"]["status"] == "completed" or None
            ),
            "the end of the run",
        )


def calls(server: Booted) -> int:
    """Return how many calls of the gateway the server has counted."""
    shown = httpx.get(f"{server.origin}/metrics", timeout=SECONDS).text
    counts = re.findall(r"^conveyor_gateway_calls_total{.*} (.*)$", shown, re.MULTILINE)
    return int(sum(map(float, counts)))
