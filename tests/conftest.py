"""Runs tests in several processes side by side, as `./scripts/test` does: groups them, and reports
on all at the end.

Each process has emulators of its own, and at most one shared fleet. So no test affects another
one's services.
"""

from __future__ import annotations

import gc
import logging
import re
import signal
import sqlite3
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import hypothesis
import pytest
from starlette.routing import compile_path
from xdist.scheduler import LoadScopeScheduling

from conveyor.aio.log_output import LogOutput
from conveyor.dev.sqlite import schema
from conveyor.dev.sqlite.schema import STEPS
from conveyor.ports.handler import UNEXPECTED_LOGGER
from tests.conformance import emulators

_MISSING = "missing_services"

# A busy machine makes no example wrong that takes long on it.
hypothesis.settings.register_profile("conveyor", deadline=None)
hypothesis.settings.load_profile("conveyor")


_MAKING = threading.Lock()


def _migrate_by_pages(connection: sqlite3.Connection) -> None:
    """Bring a new file to the schema by the pages of one that took all steps, once in this process:
    statement by statement it is most of what a short test over a store costs."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version or schema.STEPS is not STEPS:
        schema.migrate(connection)
        return
    with _MAKING:
        _migrated().backup(connection)


@cache
def _migrated() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    schema.migrate(made)
    return made


_patch = pytest.MonkeyPatch()
_patch.setattr("conveyor.dev.sqlite.store.migrate", _migrate_by_pages)
# The API of each test has the same routes, and a pattern of each is made anew.
_patch.setattr("starlette.routing.compile_path", cache(compile_path))


# What is collected lives to the end, and so does nearly all that is imported. The collector of
# cycles would look through it again and again, most of all while modules are collected or parsed.
gc.disable()
_FRESH = 50_000
"""Objects made between two looks of the collector: most are gone by then."""


def pytest_collection_finish() -> None:
    """Let the collector look through what the tests make from here on, and nothing older."""
    gc.freeze()
    gc.set_threshold(_FRESH, 20, 20)
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave to `./scripts/test --all` what runs once more on the second event loop: all servers and
    workers run on asyncio."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("anyio_backend") == "trio":
        item.add_marker(pytest.mark.extended)


def pytest_configure() -> None:
    """Heed SIGINT, also where a shell that ran this in the background had it ignored: the programs
    that tests start and interrupt would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out modules in the order collected, each to whichever process is free first; tests of
    the simulation one by one."""
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _kept_together
    return scheduler


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports which services this one could not have."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_MISSING] = list(emulators.missing)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the report of a process."""
    for reason in getattr(node, "workeroutput", {}).get(_MISSING, ()):
        if reason not in emulators.missing:
            emulators.missing.append(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the services that could not be had, whatever became of the tests that need them."""
    if emulators.missing:
        terminalreporter.section("services that could not be had", red=True, bold=True)
        for reason in emulators.missing:
            terminalreporter.line(reason, red=True)


class _Keeping(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self._records.append(record)


@pytest.fixture(autouse=True)
def unforeseen() -> Iterator[list[logging.LogRecord]]:
    """Return errors that this process survived and no port may raise; the test fails unless it
    expects them and clears the list."""
    records: list[logging.LogRecord] = []
    handler = _Keeping(records)
    logger = logging.getLogger(UNEXPECTED_LOGGER)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    assert not records, [record.getMessage() for record in records]


_LASTING = re.compile(
    "AnyIO worker thread|Trio thread|asyncio_|file-writer|.*process_request_thread"
)
"""Names of threads that outlive a test: those that wait for the next call of a library, and those
of servers that tests share, of their executors, writers and open connections."""
_ENDING = 10.0
"""Seconds in which a thread that was told to stop has to end, on a busy machine too."""


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread at work: it would go on in the tests after it, and what it
    logs, sends or draws at random would be theirs."""
    before = {*threading.enumerate()}
    yield
    left = [one for one in {*threading.enumerate()} - before if not _LASTING.match(one.name)]
    for thread in left:
        thread.join(_ENDING)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def logs_put_back(no_thread_left: None) -> Iterator[None]:
    """Put the logs back as they were: a command sets up those of its process, which here is the one
    of all tests."""
    root, ours = logging.getLogger(), logging.getLogger("conveyor")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    for handler in root.handlers:
        if isinstance(handler, LogOutput) and handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def _kept_together(test_id: str) -> str:
    module = test_id.partition("::")[0]
    if module.startswith("tests/simulation/"):
        # They share nothing. One module of them takes minutes, in which the others idle.
        return test_id
    # Else the first module with tests over a fleet would start one long before the last.
    return f"{module} over a fleet" if "[fleet" in test_id else module
