"""The descriptions of the production binding's items, indexes and metrics against the real ones."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from prometheus_client import generate_latest
from reference.dynamodb_attributes import FOUND_BY, ITEMS, OF_EVERY_ITEM

from conveyor.bootstrap.production import _measure_api
from conveyor.domain.deliveries import EventDelivery
from conveyor.domain.histogram import ANSWER, Histogram
from conveyor.domain.model import (
    Callback,
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    Problem,
    Run,
    RunStats,
    RunStatus,
    TaskFailure,
    TaskSpec,
)
from conveyor.domain.result_shape import ResultShape
from conveyor.domain.schedule import Rate, Schedule
from conveyor.domain.scheduling import FireRecord, FireStatus, Scheduling, Template
from conveyor.domain.shards import Shards
from conveyor.domain.webhooks import Webhook
from conveyor.engine.telemetry import METRICS, LoopLag, Telemetry
from conveyor.ports.outbox import Subscriber
from conveyor.prod.aws.calls import CallStats
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.counter_sums import NOTHING, GroupCount, new_process_item
from conveyor.prod.dynamodb.deliveries import new_delivery_item, new_mark_item
from conveyor.prod.dynamodb.failure_groups import FailureSample, new_group_item
from conveyor.prod.dynamodb.job_rows import JobRow, job_item
from conveyor.prod.dynamodb.outbox_rows import new_entry_item
from conveyor.prod.dynamodb.run_rows import REASON, SIZE, RunPlace, new_run_item
from conveyor.prod.dynamodb.schedules import fire_item
from conveyor.prod.dynamodb.schema import INDEXES, PARTITION_KEY, SORT_KEY, TIME_TO_LIVE
from conveyor.prod.dynamodb.submitting import intent_item
from conveyor.prod.dynamodb.task_rows import new_task_item
from conveyor.testing.clock import FakeClock
from tests.unit.metrics_page import described_metrics, served_metrics

if TYPE_CHECKING:
    from conveyor.prod.binding import ProdBinding
    from conveyor.service.service import Service


def test_every_index_of_the_table_has_its_partitions_described() -> None:
    assert FOUND_BY.keys() == INDEXES.keys()
    assert {PARTITION_KEY, SORT_KEY, TIME_TO_LIVE} <= OF_EVERY_ITEM.keys()
    assert {key for pair in INDEXES.values() for key in pair[:2]} <= OF_EVERY_ITEM.keys()


def test_every_partition_of_an_index_stands() -> None:
    finds = {partition for partitions in FOUND_BY.values() for partition in partitions}

    assert finds == {
        schema.caller_jobs("CALLER"),
        schema.caller_schedules("CALLER"),
        schema.UNSPREAD_INTENTS,
        schema.INPUTS,
        schema.EXPORTS,
        schema.OUTBOX,
        schema.DELIVERIES,
        schema.ENDED_DELIVERIES,
        *(
            re.sub(r"\d+", "N", schema.all_partitions(kind)[0])
            for kind in (
                "ingesting",
                "unsettled",
                "intents",
                "aging",
                "aged",
                "ended",
                "deleted",
                "active",
                "idle",
                "schedules",
            )
        ),
    }


JOB = Job(
    job_id="JOB",
    caller="caller",
    status=JobStatus.CLOSED,
    created_at=1,
    updated_at=1,
    callback=Callback("TOKEN"),
    webhook=Webhook("https://a.test/"),
    scheduling=Scheduling(
        schedule=Schedule(rate=Rate(1, "hour")),
        template=Template(rows=1, units=1, chunks=(0,)),
        anchor=1,
        next_at=1,
    ),
)
FIRE = FireRecord(
    fire_id="FIRE",
    status=FireStatus.STARTED,
    nominal="2026-01-01T00:00:00",
    instant=1,
    last_nominal="2026-01-01T00:00:00",
    last_instant=1,
    noted_at=1,
)
RUN = Run(
    run_id="RUN",
    job_id="JOB",
    run_sequence=1,
    status=RunStatus.RUNNING,
    created_at=1,
    updated_at=1,
    stats=RunStats(
        failure_reasons={TaskFailure.TIMEOUT: 1},
        shape=ResultShape((0,) * 7 + (1,), {"text/html": 1}),
    ),
    rerun_of="SOURCE",
    ingest=Ingest(status=IngestStatus.PENDING, end=1),
)
FAILURE = FailureSample.of("TASK", TaskFailure.TIMEOUT, Problem("a", "A", 504, detail="slow"), 1)
DELIVERY = EventDelivery(
    delivery_id="DELIVERY",
    caller="caller",
    job_id="JOB",
    run_id="RUN",
    event_type="run.completed",
    body=b"{}",
    created_at=1,
)


def test_the_attributes_of_new_items_stand() -> None:
    place = RunPlace("RUN", "JOB", 1, Shards(1))
    made = {
        "job": job_item(JobRow(JOB, 1)),
        "run": new_run_item(RUN, JOB, groups={"GROUP": GroupCount(1, 1)}),
        "task of a job in one shard": new_task_item("TASK", TaskSpec("http://a.test/"), now=1),
        "place": place.item(),
        "counters of a process": new_process_item(1, NOTHING),
        "failure group": new_group_item(FAILURE, ["TASK"]),
        "intent": intent_item(place, now=1),
        "fire": fire_item("", FIRE, retention_days=1),
        "outbox entry of a callback": new_entry_item(JOB, "RUN", Subscriber.CALLBACK, 1),
        "outbox entry of a webhook": new_entry_item(JOB, "RUN", Subscriber.WEBHOOK, 1),
        "delivery": new_delivery_item(DELIVERY),
        "mark of a delivery": new_mark_item(DELIVERY),
        "mark of a late delivery": new_mark_item(DELIVERY),
    }
    described = {item: one.attributes.keys() | OF_EVERY_ITEM.keys() for item, one in ITEMS.items()}
    described["run"] = described["run"] - {f"{REASON}REASON"} | {f"{REASON}{TaskFailure.TIMEOUT}"}
    described["run"] = described["run"] - {f"{SIZE}CLASS"} | {f"{SIZE}7"}

    assert not {item: more for item in made if (more := made[item].keys() - described[item])}


# -- metrics --


def test_every_metric_of_production_is_served_as_it_is_described() -> None:
    stats = CallStats()
    stats.calls["sqs", "receive_message", "ok"] = 1
    stats.retries["sqs", "receive_message"] = stats.throttles["sqs", "receive_message"] = 1
    stats.undone["sqs", "receive_message"] = 1
    stats.capacity["query"] = 1.0
    binding = SimpleNamespace(store=SimpleNamespace(rows_read=0, rows_returned=0), stats=stats)
    telemetry = Telemetry()
    service = SimpleNamespace(
        results=SimpleNamespace(rows_discarded=0), progress=SimpleNamespace(streams=0, reads=0)
    )
    _measure_api(
        telemetry,
        cast("ProdBinding", binding),
        cast("Service", service),
        LoopLag(FakeClock()),
        took=Histogram(ANSWER),
    )
    page = generate_latest(telemetry.registry()).decode()
    served = served_metrics(page)

    assert served == described_metrics("conveyor api")
    for name in (
        "aws_calls",
        "aws_retries",
        "aws_throttles",
        "aws_undone",
        "aws_consumed_capacity",
    ):
        (shown,) = re.findall(rf"^conveyor_{name}_total{{(.+)}} ", page, re.MULTILINE)
        assert set(re.findall(r"(\w+)=", shown)) == METRICS[name].labels.keys()
