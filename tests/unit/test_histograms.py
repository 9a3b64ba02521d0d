"""Histograms: what is measured of calls, waits, settlements, AWS and requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.from_thread
import httpx
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from conveyor.bootstrap import open_dev
from conveyor.clock import SystemClock
from conveyor.domain.histogram import CALL, STORE, WAIT, Histogram
from conveyor.engine.telemetry import METRICS, Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.http.app import V1_ROUTES
from conveyor.ports.queues import Delivery, TaskMessage
from conveyor.prod.aws.boto import BotoAws
from conveyor.prod.aws.calls import AwsOptions
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import Api, open_api
from tests.unit.test_task_handler import GatedGateway, calm
from tests.unit.wired_handlers import task_handler

ORIGIN = "http://127.0.0.1:9000"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


def page_of(telemetry: Telemetry) -> str:
    """The page of metrics for those who ask for OpenMetrics."""
    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    return encode(telemetry.registry()).decode()


def shown(telemetry: Telemetry, name: str) -> dict[str, float]:
    """The samples of a histogram, by their name and labels, as OpenMetrics shows them."""
    page = page_of(telemetry)
    [family] = [
        one
        for one in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        if one.name == f"conveyor_{name}"
    ]
    assert (family.type, family.documentation) == ("histogram", METRICS[name].help)
    return {
        f"{sample.name.removeprefix(family.name)}{sorted(sample.labels.items())}": sample.value
        for sample in family.samples
    }


def test_durations_are_counted_up_to_each_bound_and_in_all() -> None:
    telemetry, histogram = Telemetry(), Histogram((0.1, 1.0))
    telemetry.histogram("aws_seconds", histogram)
    for seconds in (0.05, 0.1, 0.5, 7.0, -3.0):
        histogram.observe(seconds, "sqs", "receive_message")

    samples = shown(telemetry, "aws_seconds")
    labels = [("operation", "receive_message"), ("service", "sqs")]
    buckets = {bound: f"_bucket{sorted([('le', bound), *labels])}" for bound in ("0.1", "1.0")}

    assert samples[buckets["0.1"]] == 3  # an upper bound is within, and a clock set back counts 0
    assert samples[buckets["1.0"]] == 4
    assert samples[f"_bucket{sorted([('le', '+Inf'), *labels])}"] == 5
    assert samples[f"_count{labels}"] == 5
    assert samples[f"_sum{labels}"] == pytest.approx(7.65)


def test_the_latest_trace_of_a_bucket_is_its_exemplar() -> None:
    telemetry = Telemetry()
    parents = [f"00-{digit * 32}-{'1' * 16}-01" for digit in "ab"]
    for parent in parents:
        telemetry.gateway_took(3.0, "successful", traceparent=parent)
    telemetry.gateway_took(0.2, "successful", traceparent="")
    page = page_of(telemetry)

    told = re.findall(r'le="([^"]+)".* # \{trace_id="(\w+)"\} (\S+)', page)
    assert told == [("5.0", "b" * 32, "3.0")]


@pytest.mark.parametrize("bounds", [CALL, STORE, WAIT])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


async def test_a_task_tells_how_long_it_waited_was_called_and_settled(api: Api) -> None:
    telemetry, gateway = Telemetry(), GatedGateway()
    job = await api.submit(1)
    run_id = job["latest_run"]["run_id"]
    [task] = await api.tasks_of(run_id)
    handler = task_handler(
        api.binding,
        gateway,
        api.clock,
        retry_policy=RetryPolicy(api.clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=telemetry,
        max_interruptions=3,
    )
    gateway.gate.set()
    api.clock.shift(40.0)
    message = TaskMessage(job["job_id"], run_id, task.task_id)

    await handler.handle(Delivery("queue", message, "receipt", 1), calm)

    waits = shown(telemetry, "start_wait_seconds")
    assert waits["_count[]"] == 1
    assert waits["_sum[]"] == pytest.approx(40.0, abs=0.01)
    calls = shown(telemetry, "gateway_seconds")
    assert calls["_count[('outcome', 'successful')]"] == 1
    assert shown(telemetry, "settlement_seconds")["_count[]"] == 1


async def test_requests_are_counted_by_method_route_and_class_of_status(tmp_path: Path) -> None:
    settings = load({}, data_dir=str(tmp_path / "data"), gateway="fake")
    runtime = await open_dev(settings, SystemClock(), origin=ORIGIN)
    transport = httpx.ASGITransport(app=runtime.app)
    headers = {"X-API-Key": "key"}
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers=headers) as client:
        await client.post("/v1/jobs", json={"tasks": [{"url": "https://a.test/"}]})
        await client.get("/v1/jobs/nothing")
        await client.get("/a/path/of/nobody?x=1")
        await client.request("BREW", "/v1/jobs")
        page = (await client.get("/metrics")).text
    await runtime.aclose()

    counts = dict(re.findall(r"^conveyor_http_seconds_count\{(.+)\} (\S+)", page, re.MULTILINE))
    assert counts['method="POST",route="/v1/jobs",status="2xx"'] == "1.0"
    assert counts['method="GET",route="/v1/jobs/{job_id}",status="4xx"'] == "1.0"
    assert counts['method="GET",route="none",status="4xx"'] == "1.0"
    routes = {re.search(r'route="([^"]+)"', labels) for labels in counts}
    assert {found[1] for found in routes if found} <= {*V1_ROUTES, "none"}
    methods = {re.search(r'method="([^"]+)"', labels) for labels in counts}
    assert {found[1] for found in methods if found} == {"GET", "POST", "other"}


class Client:
    """A client of DynamoDB that answers a second after it was called."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def get_item(self, **_parameters: Any) -> dict[str, Any]:
        anyio.from_thread.run(self._clock.advance, 1.0)
        return {"ResponseMetadata": {"HTTPHeaders": {"content-length": "2"}}}


async def test_each_try_of_a_call_to_aws_is_timed() -> None:
    clock = FakeClock()
    aws = BotoAws({"dynamodb": Client(clock)}, AwsOptions(), clock)
    await aws.call("dynamodb", "get_item", {})
    telemetry = Telemetry()
    telemetry.histogram("aws_seconds", aws.stats.took)

    samples = shown(telemetry, "aws_seconds")
    labels = [("operation", "get_item"), ("service", "dynamodb")]
    assert (samples[f"_count{labels}"], samples[f"_sum{labels}"]) == (1, 1.0)
