"""Traces of attempts and of deliveries: each ends, with its parts and its outcome."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from conveyor.domain.model import Problem, TaskFailure
from conveyor.engine.tracing import _ToldExporter
from conveyor.ports.gateway import ScrapeFailed
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.delivery_world import DeliveryWorld, delivery_world, receiving
from tests.unit.http_api import Api, open_api
from tests.unit.test_task_handler import GatedGateway, calm, handler_over


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclasses.dataclass
class Trace:
    """One trace: `ended` is None until it has ended, then its attributes and whether it failed."""

    name: str
    traceparent: str = ""
    parts: list[str] = dataclasses.field(default_factory=list)
    links: list[str] = dataclasses.field(default_factory=list)
    ended: tuple[Mapping[str, str | int], bool] | None = None

    def link(self, traceparent: str) -> None:
        self.links.append(traceparent)

    def part(self, name: str, started_at: int, ended_at: int) -> None:
        assert started_at <= ended_at
        self.parts.append(name)

    def end(
        self, ended_at: int, attributes: Mapping[str, str | int], *, failed: bool = False
    ) -> None:
        assert self.ended is None
        self.ended = attributes, failed

    @property
    def outcome(self) -> tuple[str | int, bool]:
        """The outcome that it tells, and whether it failed."""
        assert self.ended is not None
        return self.ended[0]["outcome"], self.ended[1]


class Traces:
    """A tracer that keeps every trace."""

    def __init__(self) -> None:
        self.kept: list[Trace] = []

    def begin(self, name: str, key: str, *, started_at: int) -> Trace:
        self.kept.append(Trace(name))
        return self.kept[-1]

    def begin_always(self, name: str, *, started_at: int) -> Trace:
        return self.begin(name, "", started_at=started_at)


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


async def test_an_attempt_to_deliver_ends_its_trace_with_its_outcome(world: DeliveryWorld) -> None:
    traces, deliverer = Traces(), world.deliverer
    deliverer._ports = dataclasses.replace(deliverer._ports, tracer=traces)
    async with receiving("200 OK", "503 x") as receiver:
        for _ in range(2):
            await world.owe(receiver.url)
            await world.look()

    assert [trace.name for trace in traces.kept] == ["delivery"] * 2
    assert [trace.parts for trace in traces.kept] == [["post", "note"]] * 2
    assert [trace.outcome for trace in traces.kept] == [("delivered", False), ("http_5xx", True)]


class Refusing(GatedGateway):
    """A gateway whose calls fail."""

    def scrape(self, request: object) -> object:  # type: ignore[override]
        problem = Problem("http_not_found", "Not found", 404)
        raise ScrapeFailed(problem, TaskFailure.BAD_TARGET, retryable=False)


async def work_one(api: Api, gateway: GatedGateway, traces: Traces) -> None:
    """Work the only task of a new job."""
    job = await api.submit(1)
    run_id = job["latest_run"]["run_id"]
    [task] = await api.tasks_of(run_id)
    handler = handler_over(api, gateway)
    handler._tracer = traces
    message = TaskMessage(job["job_id"], run_id, task.task_id)
    await handler.handle(Delivery("queue", message, "receipt", 1), calm)


async def test_an_attempt_of_a_task_ends_its_trace_with_its_outcome(tmp_path: Path) -> None:
    traces, good = Traces(), GatedGateway()
    good.gate.set()
    async with open_api(tmp_path) as api:
        await work_one(api, good, traces)
        await work_one(api, Refusing(), traces)

    assert [trace.name for trace in traces.kept] == ["attempt"] * 2
    assert traces.kept[0].parts[:2] == traces.kept[1].parts[:2] == ["claim", "gateway"]
    assert [trace.ended is not None and trace.ended[1] for trace in traces.kept] == [False, True]


class Collector(SpanExporter):
    """A collector that takes spans, or none."""

    def __init__(self, *results: SpanExportResult) -> None:
        self._results = list(results)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._results.pop(0)


def test_a_collector_is_told_of_when_it_ceases_to_take_spans_and_when_it_takes_them_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken, failed = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    results = (taken, failed, failed, taken, taken, failed)
    exporter = _ToldExporter(Collector(*results), "http://collector.test")
    told = []
    for _ in results:
        caplog.clear()
        with caplog.at_level(logging.INFO, "conveyor.engine"):
            exporter.export(())
        told.append([record.levelname for record in caplog.records])

    assert told == [[], ["WARNING"], [], ["INFO"], [], ["WARNING"]]
