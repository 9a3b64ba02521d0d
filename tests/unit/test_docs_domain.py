"""SPEC.md against the domain; the meanings of columns against the schema."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from itertools import chain

import pytest
from reference.sqlite_columns import read_meanings

from conveyor.dev.sqlite.schema import STEPS, migrate
from conveyor.domain.deliveries import LADDER, DeliveryStatus
from conveyor.domain.model import RunFailure, TaskFailure
from conveyor.domain.states import JOB_TRANSITIONS, RUN_TRANSITIONS
from conveyor.domain.task_rules import TASK_TRANSITIONS
from conveyor.gateway import problems
from conveyor.gateway.fake import Behaviour
from conveyor.wire.errors import TransportTrouble
from tests.unit.spec_document import ROOT, SPEC, differences, name, names, section, table, tables

WEBHOOKS = ROOT / "docs" / "webhooks.md"
STATUS = re.compile(r"\d{3}|any other")


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
    right = {
        (str(before), str(after)) for before, afters in transitions.items() for after in afters
    }
    assert not differences(f"SPEC.md, {kind} state", arrows, right)
    named = set(names(section("States and counters")))
    assert {str(state) for state in transitions} <= named


def test_every_reason_in_the_roll_up_has_its_verdicts() -> None:
    verdicts = section("Verdicts of the gateways")
    reasons = {
        word
        for heading, rows in tables(verdicts)
        for row in rows
        for word in names(row[heading.index("Reason in the roll-up")])
    }

    assert not differences("SPEC.md, verdicts of the gateways", reasons, set(TaskFailure))
    of_an_account = set(RunFailure) - {RunFailure.INGEST_FAILED}
    assert of_an_account <= set(names(verdicts))
    assert RunFailure.INGEST_FAILED in names(SPEC)


def test_what_breaks_a_scrape_has_the_verdict_told() -> None:
    failures = [
        *map(problems.transport_failure, TransportTrouble),
        *map(problems.target_failure, TransportTrouble),
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

    right = {
        failure.problem.code: ("retry" if failure.retryable else "fail", failure.failure.value)
        for failure in failures
    }
    assert not differences("SPEC.md, verdicts of the gateways", told, right)


def test_the_ladder_of_deliveries_is_told() -> None:
    def told(seconds: int) -> str:
        for unit, length in (("h", 3_600), ("min", 60)):
            if seconds >= length:
                return f"{seconds // length} {unit}"
        return f"{seconds} s"

    waits = [told(seconds) for seconds in LADDER]
    assert ", ".join(waits[:-1]) + " and " + waits[-1] in " ".join(section("Webhooks").split())
    rows = [row[1] for row in table("Failed attempt", text=WEBHOOKS.read_text())]
    assert ", ".join(rows[:-1]) == ", ".join(waits)


def test_the_states_of_a_delivery_are_told() -> None:
    rows = table("The delivery", "Means", "Next")
    assert [name(row[0]) for row in rows] == list(DeliveryStatus)


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

    told = set(names(listed))
    assert not differences("SPEC.md, fake gateway", told, Behaviour.__struct_fields__)


# -- the store --


@pytest.fixture
def schema() -> Iterator[sqlite3.Connection]:
    """An empty database of the present schema."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    yield connection
    connection.close()


def test_every_table_and_column_has_a_meaning(schema: sqlite3.Connection) -> None:
    found = {
        table_name: [column[1] for column in schema.execute(f"PRAGMA table_info({table_name})")]
        for (table_name,) in schema.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
    }

    meanings = read_meanings(chain.from_iterable(STEPS))

    where = "the comments of conveyor/dev/sqlite/schema.py"
    assert not differences(where, meanings.keys(), found.keys())
    for known, columns in found.items():
        assert not differences(f"{where}, {known}", meanings[known][1].keys(), columns)
    assert all(holds for holds, _ in meanings.values())


def test_comments_of_a_later_step_are_read_too() -> None:
    statements = (
        "CREATE TABLE a ( -- one row\n  b TEXT, -- of b,\n    -- goes on\n  UNIQUE (b)\n)",
        "CREATE TABLE c (\n  -- two lines\n  -- of it\n  d TEXT\n)",
        "CREATE INDEX a_by_b ON a (b)",
        "ALTER TABLE a ADD COLUMN e TEXT -- of e",
    )

    assert read_meanings(statements) == {
        "a": ("one row", {"b": "of b, goes on", "e": "of e"}),
        "c": ("two lines of it", {}),
    }
