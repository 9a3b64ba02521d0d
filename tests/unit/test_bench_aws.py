"""The counts and groups of the benchmarks over AWS: the meaning of the figures in their tables."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.aws_calls import Costs, table
from bench.aws_carriers import WEIGHTS
from bench.aws_carriers import table as carriers_table
from bench.aws_fleet import Used
from bench.aws_profile import HANDED, LOOP, costs, name_of
from bench.aws_purposes import OTHER, PURPOSES, purpose, purpose_of
from bench.aws_role import COUNTS, CountedAws, named_call
from bench.cpu_samples import Frame, log_of, read_samples, seconds_sampled
from bench.fleet import received
from bench.harness import ROOT, Row
from conveyor.prod.aws.calls import Answer, Parameters

STORE = f"{ROOT}/conveyor/prod/dynamodb/claims.py"
BOTO = "/env/site-packages/botocore"
SAMPLES = f"""\
_run_module_as_main (<frozen runpy>:198);take ({STORE}:9);pick ({STORE}:11) 30
Thread._bootstrap (/py/threading.py:1);update_item (<dynamodb>:7);sign ({BOTO}/auth.py:5) 50
Thread._bootstrap (/py/threading.py:1);update_item (<dynamodb>:7);parse ({BOTO}/parsers.py:5) 19
Thread._bootstrap (/py/threading.py:1);Queue.get (/py/queue.py:3) 1
sign ({BOTO}/auth.py:5) 44
"""
TOLD = "py-spy> Wrote raw flamegraph data to 'work.txt'. Samples: 144 Errors: 56"


def _figures(rows: list[Row], name: str) -> dict[str, float | int | str]:
    return next(row.figures for row in rows if row.name == name)


def test_a_task_over_a_carrier_is_its_calls_by_their_share() -> None:
    boto, http = (dict.fromkeys(WEIGHTS, figure) for figure in (1.0, 0.1))
    rows = carriers_table("AWS", boto, http)
    whole = {"boto, ms": 3.7, "http, ms": 0.37, "x": 10.0}
    assert _figures(rows, "AWS: a task") == whole
    assert _figures(rows, "AWS: receive") == {"boto, ms": 1.0, "http, ms": 0.1, "x": 10.0}


def test_a_call_is_for_the_innermost_function_that_has_a_purpose() -> None:
    claims = "conveyor.prod.dynamodb.claims"
    assert purpose_of(claims, "Claims._claim_pending") == "claim"
    assert purpose_of(claims, "Claims.renew.<locals>.renew") == "renewal of claims"
    assert purpose_of(claims, "Claims._write") is None
    assert purpose_of("conveyor.prod.dynamodb.permits", "DynamoPermits.hold") == "permits"
    assert purpose_of("json", "dumps") is None
    assert purpose() == OTHER


def test_a_call_shows_its_operation_to_whoever_samples_it() -> None:
    call = named_call("s3", "put_object", lambda **parameters: (sys._getframe(1), parameters))
    frame, parameters = call(Key="k")
    assert (frame.f_code.co_filename, frame.f_code.co_qualname) == ("<s3>", "put_object")
    assert parameters == {"Key": "k"}


async def test_calls_are_counted_by_service_operation_and_purpose() -> None:
    aws = CountedAws(Answering())
    before = COUNTS.look()
    run_queue = {"QueueUrl": "http://sqs.test/conveyor-t-run-1-1"}
    await aws.call("sqs", "receive_message", run_queue)
    await aws.call("sqs", "receive_message", {"QueueUrl": "http://sqs.test/conveyor-t-control"})
    await aws.call("dynamodb", "get_item", {})
    look = COUNTS.look()
    made = Counter(look.calls) - Counter(before.calls)
    assert made == {
        "sqs receive_message (tasks)": 1,
        "sqs receive_message (control)": 1,
        f"dynamodb get_item ({OTHER})": 1,
    }
    assert (look.messages - before.messages, look.again - before.again) == (3, 1)


class Answering:
    """A transport that answers with three messages, one of them for the second time."""

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        counts = ("1", "2", "1")
        return {"Messages": [{"Attributes": {"ApproximateReceiveCount": one}} for one in counts]}

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return ""


def test_every_purpose_names_code_that_is_there() -> None:
    for name in PURPOSES:
        parts = name.split(".")
        depth = next(
            (length for length in range(len(parts), 0, -1) if _source(parts[:length])), None
        )
        assert depth is not None, name
        source = _source(parts[:depth])
        for function in parts[depth:]:
            assert any(f"{kind} {function}" in source for kind in ("class", "def")), name


def _source(parts: list[str]) -> str:
    """The text of a module or package, by its name below `conveyor` or `conveyor.prod`."""
    for root in (ROOT / "conveyor", ROOT / "conveyor" / "prod"):
        path = root.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file.read_text() or "#"
    return ""


def test_a_sample_belongs_to_its_operation_or_to_the_innermost_code_with_a_name() -> None:
    calling = Frame("<s3>", "put_object")
    assert name_of([calling, Frame(f"{BOTO}/auth.py", "sign"), Frame("/py/hmac.py", "new")]) == (
        "s3 put_object: signing"
    )
    assert name_of([Frame("/py/threading.py", "run"), calling]).startswith("s3 put_object: hooks")
    assert name_of([Frame(STORE, "take"), Frame("/py/json/encoder.py", "encode")]) == "store"
    hop = [Frame("/py/queue.py", "Queue.put"), Frame("/py/threading.py", "Condition.notify")]
    assert name_of([Frame(STORE, "take"), *hop]) == HANDED
    assert name_of([Frame("<frozen runpy>", "main")]) == LOOP


def test_torn_samples_are_no_samples() -> None:
    assert [sample.times for sample in read_samples(SAMPLES)] == [30, 50, 19, 1]


def test_samples_of_every_thread_tell_the_thread() -> None:
    text = (
        "thread (71): MainThread;<module> (<string>:1);run (/py/runners.py:118) 4\n"
        "thread (72): file-writer;Thread._bootstrap (/py/threading.py:1);write (/a/files.py:7) 2\n"
        "thread (72): file-writer;write (/a/files.py:7) 1\n"
    )

    assert read_samples(text) == [
        ((("<string>", "<module>"), ("/py/runners.py", "run")), 4, 71),
        ((("/py/threading.py", "Thread._bootstrap"), ("/a/files.py", "write")), 2, 72),
    ]


def test_the_interpreters_time_is_shared_out_and_the_rest_of_the_cpu_is_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "work.txt"
    path.write_text(SAMPLES)
    log_of(path).write_text(TOLD)
    assert seconds_sampled(TOLD) == 1.0

    rows = costs("work", path, cpu=1.25, tasks=100)

    told = {row.name: row.figures["ms a task"] for row in rows}
    assert told == {
        "work, worker: all of the CPU": 12.5,
        "work, worker: dynamodb update_item: signing": 5.0,
        "work, worker: store": 3.0,
        "work, worker: dynamodb update_item: parsing": 1.9,
        "work, worker: lesser ones together": 0.1,
        "work, worker: outside the interpreter": 2.5,
    }


def test_no_more_time_than_cpu_is_told(tmp_path: Path) -> None:
    path = tmp_path / "work.txt"
    path.write_text(SAMPLES)
    log_of(path).write_text(TOLD)
    told = {row.name: row.figures["ms a task"] for row in costs("work", path, cpu=0.5, tasks=100)}
    assert told["work, worker: dynamodb update_item: signing"] == 2.5
    assert told["work, worker: outside the interpreter"] == 0.0


def test_a_sampler_that_saw_nothing_is_no_profile() -> None:
    with pytest.raises(ValueError, match="did not say"):
        seconds_sampled("Error: Permission denied")


def test_calls_are_told_for_each_task_of_their_phase() -> None:
    ingest = Used(Counter({"dynamodb get_item (checkpoint)": 40}), units=1_000.0, cpu=0.5)
    work = Used(Counter({"redis script (permits)": 5, "s3 put_object (body)": 100}), cpu=1.0)
    api = Used(Counter({"s3 put_object (staged)": 10}), cpu=0.1)

    rows = table([Costs("1,000", 1_000, api, ingest, 100, work)])

    assert _figures(rows, "ingest: all calls") == {"1,000": 0.05}
    assert _figures(rows, "ingest: capacity units") == {"1,000": 1.0}
    assert _figures(rows, "ingest: ms CPU") == {"1,000": 0.6}
    assert _figures(rows, "ingest: ms CPU of the api alone") == {"1,000": 0.1}
    assert _figures(rows, "work: redis script (permits)") == {"1,000": 0.05}
    assert _figures(rows, "work: ms CPU") == {"1,000": 10.0}


def test_what_the_window_cuts_off_did_not_come_again() -> None:
    used = Used(Counter({"sqs receive_message (tasks)": 100}), messages=887, again=0)
    assert received(used, 870) == {
        "received a task": 1.0,
        "came again": 0,
        "received, not ended": 17,
        "receive calls a task": 0.11,
        "permit calls a task": 0.0,
    }
