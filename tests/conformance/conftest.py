"""Fixtures of the conformance suite: each binding in turn, empty, under virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.dev.sqlite import SqliteStore
from conveyor.ports.binding import Exports, Inputs, Jobs, Runs, Tasks
from conveyor.ports.deliveries import Deliveries
from conveyor.ports.outbox import Outbox
from conveyor.ports.records import Idempotency
from conveyor.ports.schedules import Schedules
from conveyor.ports.signing_keys import SigningKeys
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import BINDINGS, BindingKind, Store
from tests.conformance.dynamo_runs import TableBench, open_bench
from tests.conformance.world import World


@pytest.fixture
def anyio_backend() -> str:
    """The stores belong to asyncio."""
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    """Virtual time, the same in every test."""
    return FakeClock()


@pytest.fixture(params=BINDINGS, ids=lambda kind: kind.name)
def binding_kind(request: pytest.FixtureRequest) -> BindingKind:
    """Each binding in turn."""
    kind: BindingKind = request.param
    return kind


@pytest.fixture
async def store(
    binding_kind: BindingKind, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[Store]:
    """An empty store."""
    opened = await binding_kind.open(tmp_path, clock.now())
    yield opened
    await opened.aclose()


@pytest.fixture
def sqlite_store(binding_kind: BindingKind, store: Store) -> SqliteStore:
    """The store of a binding that is declared to be one SQLite file; others skip the test."""
    assert isinstance(store, SqliteStore) is binding_kind.is_sqlite
    if not isinstance(store, SqliteStore):
        pytest.skip(f"{binding_kind.name} is declared to be no SQLite file")
    return store


@pytest.fixture
def jobs(store: Store) -> Jobs:
    """Its jobs."""
    return store.jobs


@pytest.fixture
def runs(store: Store) -> Runs:
    """Its runs."""
    return store.runs


@pytest.fixture
def idempotency(store: Store) -> Idempotency:
    """Its idempotency keys."""
    return store.idempotency


@pytest.fixture
def tasks(store: Store) -> Tasks:
    """Its tasks."""
    return store.tasks


@pytest.fixture
def inputs(store: Store) -> Inputs:
    """Its slots for files."""
    return store.inputs


@pytest.fixture
def exports(store: Store) -> Exports:
    """Its exports."""
    return store.exports


@pytest.fixture
def outbox(store: Store) -> Outbox:
    """Its notices."""
    return store.outbox


@pytest.fixture
def signing_keys(store: Store) -> SigningKeys:
    """Its signing keys."""
    return store.signing_keys


@pytest.fixture
def deliveries(store: Store) -> Deliveries:
    """Its deliveries."""
    return store.deliveries


@pytest.fixture
def schedules(store: Store) -> Schedules:
    """Its schedules."""
    return store.schedules


@pytest.fixture
def world(store: Store, clock: FakeClock) -> World:
    """Short words for what tests do to a store."""
    return World(store, clock)


@pytest.fixture
async def bench(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TableBench]:
    """A table of DynamoDB, and any number of processes behind a faulty transport."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    opened = await open_bench(clock)
    yield opened
    await opened.aclose()


@pytest.fixture
def one(bench: TableBench) -> World:
    """A process."""
    return bench.world(worker="one")


@pytest.fixture
def two(bench: TableBench) -> World:
    """Another one."""
    return bench.world(worker="two")
