"""SPEC.md against the domain, the ports and the store."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.dev.sqlite.schema import migrate
from conveyor.domain.model import RunFailure, TaskFailure
from conveyor.domain.states import JOB_TRANSITIONS, RUN_TRANSITIONS, TASK_TRANSITIONS
from conveyor.gateway import problems
from conveyor.gateway.fake import Behaviour
from conveyor.gateway.http_client import Trouble
from conveyor.ports import (
    blobs,
    clock,
    exports,
    gateway,
    handler,
    ingestion,
    inputs,
    outbox,
    permits,
    queues,
    rate_limit,
    records,
    sweeping,
    tasks,
)
from conveyor.ports.outbox import Callbacks
from conveyor.ports.queues import Signals
from tests.unit.spec_document import name, names, once, section, table, tables

STATUS = re.compile(r"\d{3}|any other")


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


# -- the domain --


@pytest.mark.parametrize(
    ("kind", "transitions"),
    [("Job", JOB_TRANSITIONS), ("Run", RUN_TRANSITIONS), ("Task", TASK_TRANSITIONS)],
)
def test_the_states_are_those_of_the_transition_table(
    kind: str, transitions: dict[str, frozenset[str]]
) -> None:
    rows = table(f"{kind} state", "May become")
    arrows = [(name(row[0]), name(row[1])) for row in rows]

    assert len(arrows) == len(set(arrows))
    assert set(arrows) == {
        (str(before), str(after)) for before, afters in transitions.items() for after in afters
    }
    named = set(names(section("4. States and counters")))
    assert {str(state) for state in transitions} <= named


def test_every_reason_in_the_roll_up_has_its_verdicts() -> None:
    verdicts = section("Verdicts of the gateways")
    reasons = {
        word
        for heading, rows in tables(verdicts)
        for row in rows
        for word in names(row[heading.index("Reason in the roll-up")])
    }

    assert reasons == set(TaskFailure)
    of_an_account = set(RunFailure) - {RunFailure.INGEST_FAILED}
    assert of_an_account <= set(names(verdicts))
    assert RunFailure.INGEST_FAILED in names(section("Ingesting"))


def test_what_breaks_a_scrape_has_the_verdict_told() -> None:
    failures = [
        *map(problems.transport_failure, Trouble),
        problems.corrupt_body(),
        problems.too_large(1),
        problems.too_many_codings(),
        problems.too_many_redirects(),
        problems.unsupported_scheme(),
        problems.impossible_name(),
        problems.invalid_headers(),
    ]
    told = {
        name(row[3]): (row[1], name(row[2]))
        for first in ("What happened", "Answer")
        for row in table(first, "Verdict", "Reason in the roll-up", "Code of the problem")
        if not STATUS.match(row[0])
    }

    assert told == {
        failure.problem.code: ("retry" if failure.retryable else "fail", failure.failure.value)
        for failure in failures
    }


def test_the_statuses_of_a_target_have_the_verdict_told() -> None:
    rows = table("Answer", "Verdict", "Reason in the roll-up", "Code of the problem")
    told = [(re.findall(r"\d{3}", row[0]), row) for row in rows if re.match(r"\d{3}", row[0])]

    for statuses, row in told:
        for status in statuses:
            failure = problems.target_verdict(int(status), retry_after=0.0)
            assert row[1] == ("retry" if failure.retryable else "fail"), row
            assert name(row[2]) == failure.failure
            assert name(row[3]) == failure.problem.code
    assert sum(len(statuses) for statuses, _ in told) > 5


def test_every_word_of_the_fake_gateway_stands() -> None:
    listed = section("Verdicts of the gateways").partition("**Fake gateway.**")[2]

    assert set(names(listed)) == set(Behaviour.__struct_fields__)


PORTS: dict[str, type] = {
    "Jobs": records.Jobs,
    "FindsJobs": records.FindsJobs,
    "Runs": records.Runs,
    "Dispatchable": records.Dispatchable,
    "Idempotency": records.Idempotency,
    "Tasks": tasks.Tasks,
    "Ingestion": ingestion.Ingestion,
    "Inputs": inputs.Inputs,
    "Exports": exports.Exports,
    "Sweeping": sweeping.Sweeping,
    "Outbox": outbox.Outbox,
    "Callbacks": Callbacks,
    "Queues": queues.Queues,
    "Blobs": blobs.Blobs,
    "Permits": permits.Permits,
    "RateLimit": rate_limit.RateLimit,
    "Gateway": gateway.Gateway,
    "Signals": Signals,
    "Clock": clock.Clock,
    "Handler": handler.Handler,
    "Observer": handler.Observer,
}


def test_every_method_of_every_port_stands_with_its_contract() -> None:
    listed = {
        port: once(
            word
            for row in table("Method", "Contract in a line", text=section(port))
            for word in names(row[0])
        )
        for port in PORTS
    }

    assert listed == {
        port: {method for method in vars(protocol) if not method.startswith("_")}
        for port, protocol in PORTS.items()
    }


# -- the store --


@pytest.fixture
def schema() -> Iterator[sqlite3.Connection]:
    """An empty database of the present schema."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    yield connection
    connection.close()


def test_every_table_and_column_stands(schema: sqlite3.Connection) -> None:
    found = {
        table_name: [column[1] for column in schema.execute(f"PRAGMA table_info({table_name})")]
        for (table_name,) in schema.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
    }

    assert {name(row[0]): names(row[1]) for row in table("Table", "Columns", "Holds")} == found


def test_every_index_stands(schema: sqlite3.Connection) -> None:
    found = {
        index: [on, *[column[2] for column in schema.execute(f"PRAGMA index_info({index})")]]
        for index, on in schema.execute(
            "SELECT name, tbl_name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
    }

    assert {name(row[0]): names(row[1]) for row in table("Index", "On")} == found


def test_the_schema_version_stands(schema: sqlite3.Connection) -> None:
    rows = {name(row[0]): row[1] for row in table("Pragma", "Value")}
    (version,) = schema.execute("PRAGMA user_version").fetchone()

    assert rows["user_version"] == str(version)


async def test_the_pragmas_are_those_in_force(tmp_path: Path) -> None:
    from conveyor.dev.sqlite.database import open_reader, open_writer

    rows = {name(row[0]): row[1] for row in table("Pragma", "Value")}
    writer = await open_writer(tmp_path / "conveyor.db", migrate)
    reader = await open_reader(tmp_path / "conveyor.db")

    def read(pragma: str) -> Any:
        return lambda connection: connection.execute(f"PRAGMA {pragma}").fetchone()[0]

    try:
        assert rows["journal_mode"] == f"`{(await writer.run(read('journal_mode'))).upper()}`"
        assert rows["synchronous"] == "`NORMAL`"
        assert await writer.run(read("synchronous")) == 1
        pages = await writer.run(read("wal_autocheckpoint"))
        assert rows["wal_autocheckpoint"] == f"{pages:,} pages"
        limit = await writer.run(read("journal_size_limit"))
        assert rows["journal_size_limit"] == f"{limit // 2**20} MiB"
        sizes = [-await one.run(read("cache_size")) // 2**10 for one in (writer, reader)]
        assert rows["cache_size"] == f"{sizes[0]} MiB for the writer, {sizes[1]} MiB a reader"
        assert await reader.run(read("query_only")) == 1
    finally:
        await reader.close()
        await writer.close()
