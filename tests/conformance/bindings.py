"""The bindings under test. A test asks a binding for its capabilities, never for its name."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conveyor.dev.sqlite import open_store
from conveyor.ports.binding import Exports, Ingestion, Inputs, Jobs, Runs, Tasks
from conveyor.ports.deliveries import Deliveries
from conveyor.ports.maintenance import Sweeping
from conveyor.ports.outbox import Outbox
from conveyor.ports.records import Idempotency
from conveyor.ports.schedules import Schedules
from conveyor.ports.signing_keys import SigningKeys
from tests.conformance.production_store import open_production


class Store(Protocol):
    """The records and tasks ports of one binding over one place."""

    @property
    def jobs(self) -> Jobs: ...

    @property
    def runs(self) -> Runs: ...

    @property
    def idempotency(self) -> Idempotency: ...

    @property
    def tasks(self) -> Tasks: ...

    @property
    def ingestion(self) -> Ingestion: ...

    @property
    def inputs(self) -> Inputs: ...

    @property
    def exports(self) -> Exports: ...

    @property
    def sweeping(self) -> Sweeping: ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def signing_keys(self) -> SigningKeys: ...

    @property
    def deliveries(self) -> Deliveries: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def rows_read(self) -> int: ...

    @property
    def rows_returned(self) -> int: ...

    async def aclose(self) -> None: ...


class OpenStore(Protocol):
    """Opens an empty store, in which a caller has `daily_tasks` accepted a day, 0 for no limit."""

    def __call__(self, path: Path, now: int, /, *, daily_tasks: int = 0) -> Awaitable[Store]: ...


@dataclass(frozen=True, slots=True)
class BindingKind:
    """A binding and what it can do beyond the ports' promises.

    `filtered_pages_read_only_matches`: a page by status touches no row that it does not return.
    `effort`: the share of the random steps that it is put through, less than 1.0 where each call
    takes milliseconds. `is_sqlite`: it is one SQLite file of one process, so that tests change rows
    behind its ports, and a boot voids all claims. `ages_by_time_to_live`: old fires go by
    themselves.
    """

    name: str
    open: OpenStore
    filtered_pages_read_only_matches: bool
    effort: float
    is_sqlite: bool
    ages_by_time_to_live: bool


async def _open_development(path: Path, now: int, *, daily_tasks: int = 0) -> Store:
    return await open_store(path / "conveyor.db", now=now, daily_tasks=daily_tasks)


BINDINGS = [
    BindingKind(
        name="development",
        open=_open_development,
        filtered_pages_read_only_matches=True,
        effort=1.0,
        is_sqlite=True,
        ages_by_time_to_live=False,
    ),
    BindingKind(
        name="production",
        open=open_production,
        filtered_pages_read_only_matches=False,
        effort=0.3,
        is_sqlite=False,
        ages_by_time_to_live=True,
    ),
]
