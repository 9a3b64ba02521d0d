"""SPEC.md against the production binding: its items, indexes, queues, lifecycle rules, metrics."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from prometheus_client import generate_latest

from conveyor.bootstrap.production import _measure
from conveyor.domain import ids
from conveyor.domain.model import (
    Callback,
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    Run,
    RunStats,
    RunStatus,
    TaskFailure,
    TaskSpec,
)
from conveyor.domain.shards import Shards
from conveyor.engine.telemetry import LoopLag, Telemetry
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.aws.calls import CallStats
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.job_rows import JobRow, job_item
from conveyor.prod.dynamodb.run_rows import REASON, Place, new_notice_item, new_run_item
from conveyor.prod.dynamodb.schema import INDEXES, PARTITION_KEY, SORT_KEY, TIME_TO_LIVE
from conveyor.prod.dynamodb.submitting import intent_item
from conveyor.prod.dynamodb.task_rows import new_task_item
from conveyor.prod.redis.permits import ledger_key
from conveyor.prod.s3.bucket import lifecycle_rules
from conveyor.prod.sqs.registry import prefix, run_queue_name
from conveyor.testing.clock import FakeClock
from tests.unit.spec_document import name, names, once, section, table

if TYPE_CHECKING:
    from conveyor.prod.binding import ProdBinding

STORAGE = section("10. Storage of the production binding")
INDEX_KEYS = {key for partition, sort, _ in INDEXES.values() for key in (partition, sort)}
OF_EVERY_ITEM = {"shape", TIME_TO_LIVE, *INDEX_KEYS}


def task_key(shards: Shards) -> schema.Key:
    """The key of the task with the index 7."""
    task_id = next(iter(ids.task_ids("RUN", 7, 1)))
    key = schema.task_key("JOB", "RUN", task_id, shards)
    return schema.Key(key.pk, key.sk.replace(task_id, "TASK"))


# -- the table --


def test_every_item_stands_under_its_key() -> None:
    told = {row[0]: (name(row[1]), name(row[2])) for row in table("Item", "Partition key")}

    assert told == {
        "job": schema.job_key("JOB"),
        "run": schema.run_key("JOB", 1),
        "place": schema.place_key("RUN"),
        "task of a job in one shard": task_key(Shards(1)),
        "task of a job in more shards": task_key(Shards(8)),
        "pin": schema.pin_key("JOB", "SOURCE", "RUN"),
        "intent": schema.intent_key("JOB", "RUN"),
        "idempotency key": schema.idempotency_key("SCOPE"),
        "file input": schema.input_item_key("INPUT"),
        "export": schema.export_item_key("EXPORT"),
        "mark of an export": schema.exported_key("JOB", "RUN", "EXPORT"),
        "notice": schema.notice_key("RUN"),
        "permits": schema.permits_key("JOB"),
        "sweep": schema.SWEEP,
        "fleet": schema.FLEET,
        "data key": schema.DATA_KEY,
    }


def test_every_index_of_the_table_stands_with_what_it_carries() -> None:
    rows = table("Table index", "Keys", "Carries", "Finds")

    assert {name(row[0]): (*names(row[1]), tuple(names(row[2]))) for row in rows} == INDEXES
    assert {PARTITION_KEY, SORT_KEY, TIME_TO_LIVE} <= set(names(STORAGE))


def test_every_partition_of_an_index_stands() -> None:
    finds = {
        partition
        for row in table("Table index", "Keys", "Carries", "Finds")
        for partition in names(row[3])
    }

    assert finds == {
        schema.caller_jobs("CALLER"),
        schema.INTENTS,
        schema.INPUTS,
        schema.EXPORTS,
        schema.OUTBOX,
        *(
            re.sub(r"\d+", "N", schema.every(kind)[0])
            for kind in ("ingesting", "unsettled", "ended", "deleted", "active", "idle")
        ),
    }
    assert f"modulo {schema.SPREAD}" in STORAGE


def test_the_attributes_of_new_items_stand() -> None:
    job = Job(job_id="JOB", caller="caller", status=JobStatus.CLOSED, created_at=1, updated_at=1)
    run = Run(
        run_id="RUN",
        job_id="JOB",
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=1,
        updated_at=1,
        stats=RunStats(failure_reasons={TaskFailure.TIMEOUT: 1}),
        rerun_of="SOURCE",
        ingest=Ingest(status=IngestStatus.PENDING, end=1),
    )
    place = Place("RUN", "JOB", 1, Shards(1))
    made = {
        "job": job_item(JobRow(job, 1)),
        "run": new_run_item(run, job),
        "task": new_task_item("TASK", TaskSpec("http://a.test/"), now=1),
        "place": place.item(),
        "intent": intent_item(place, now=1),
        "notice": new_notice_item(run, Callback("TOKEN")),
    }
    told = {row[0]: set(names(row[1])) for row in table("Attributes of", "Are")}
    told["intent"] |= told["place"]
    told["run"].add(f"{REASON}{TaskFailure.TIMEOUT}")

    assert REASON in told["run"]
    assert not {
        item: more for item in made if (more := made[item].keys() - told[item] - OF_EVERY_ITEM)
    }


# -- queues, the bucket, Redis --


def test_every_queue_stands_by_its_name() -> None:
    rows = table("Queue", "Is there", "Retention")

    assert once(name(row[0]) for row in rows) == {
        f"{prefix('ENVIRONMENT')}{CONTROL_QUEUE}",
        f"{prefix('ENVIRONMENT')}{DEAD_LETTER_QUEUE}",
        run_queue_name("ENVIRONMENT", "RUN", 1).removesuffix("1") + "GENERATION",
    }


def test_every_lifecycle_rule_stands_with_its_days() -> None:
    told = {}
    for rule, below, days in table("Lifecycle rule", "Prefix", "After days"):
        told[name(rule)] = ("".join(names(below)), int(days.partition(",")[0]))

    assert told == {
        rule["ID"]: (
            rule["Filter"]["Prefix"],
            rule["Expiration"]["Days"]
            if "Expiration" in rule
            else rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"],
        )
        for rule in lifecycle_rules()
    }


def test_the_ledger_in_redis_stands_under_its_key() -> None:
    rows = table("Key", "Holds", "Kept")

    assert name(rows[0][0]) == ledger_key("ENVIRONMENT")


# -- metrics --


def test_every_metric_of_production_stands_with_its_labels() -> None:
    stats = CallStats()
    stats.calls["sqs", "receive_message", "ok"] = 1
    stats.retries["sqs", "receive_message"] = stats.throttles["sqs", "receive_message"] = 1
    stats.capacity["query"] = 1.0
    binding = SimpleNamespace(store=SimpleNamespace(rows_read=0, rows_returned=0), stats=stats)
    telemetry = Telemetry()
    _measure(telemetry, cast("ProdBinding", binding), lag=LoopLag(FakeClock()), discarded=int)
    page = generate_latest(telemetry.registry()).decode()
    served = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    own = table("Metric of production", "Type", "Labels", "Meaning")
    shared = {name(row[0]): row[1] for row in table("Metric", "Type", "Labels", "Meaning")}
    for of_development in ("conveyor_wal_bytes", "conveyor_permits", "conveyor_queue_depth"):
        del shared[of_development]

    assert served == shared | {name(row[0]): row[1] for row in own}
    for row in own:
        (shown,) = re.findall(rf"^{name(row[0])}{{(.+)}} ", page, re.MULTILINE)
        labels = re.findall(r"(\w+)=", shown)
        assert set(labels) == set(names(row[2])[: len(labels)])
