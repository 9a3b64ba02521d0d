"""A pytest plugin: collect once, and run the tests in several processes forked from that one.

    python -m pytest -p tests.forks --forks 2

pytest-xdist imports and collects in each of its processes, has one more to report, and sends that
three reports of each test. Here each process takes the next module that nobody has, and says one
word of a test that passed.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, cast

import pytest

Module = list[pytest.Item]
_NUMBER = 4
"""The bytes of a module's number in the line of modules."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    parser.addoption("--forks", type=int, default=0, help="run tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what was collected, unless it could not be, or one process is to do it."""
    count: int = session.config.getoption("forks")
    if count < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    modules = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    line, line_in = os.pipe()
    os.write(line_in, b"".join(n.to_bytes(_NUMBER, "big") for n in range(len(modules))))
    os.close(line_in)
    processes: list[Process] = []
    try:
        for number in range(count):
            processes.append(Process(session, number, modules, line))  # noqa: PERF401 - ends them
        _listen(session, {one.words: one for one in processes})
    finally:
        os.close(line)
        for process in processes:
            process.end()
    return True


def _listen(session: pytest.Session, processes: dict[Connection, Process]) -> None:
    """Report the words of all processes until they have ended."""
    while processes:
        for words in cast("list[Connection]", wait(list(processes))):
            if not processes[words].hear():
                del processes[words]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)


class Process:
    """One process that runs tests, as the one that reports sees it."""

    def __init__(
        self, session: pytest.Session, number: int, modules: Sequence[Module], line: int
    ) -> None:
        self._session = session
        self._modules = modules
        self._left: deque[pytest.Item] = deque()
        self.words, told = Pipe(duplex=False)
        # Else each process would write once more what is still to be written.
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self.words.close()
            _work(session, number, _taken(modules, line, told), told)
        told.close()

    def hear(self) -> bool:
        """Report what it says next; tell whether it goes on."""
        try:
            said = self.words.recv()
        except EOFError:
            self._report(_report(self._lost(), "failed", "its process ended in the middle of it"))
            return False
        match said:
            case None:
                return False
            case int():
                self._left += self._modules[said]
            case float():
                self._report(_report(self._left.popleft(), "passed", None, said))
            case _:
                self._left.popleft()
                config = self._session.config
                for data in said:
                    self._report(
                        config.hook.pytest_report_from_serializable(config=config, data=data)
                    )
        return True

    def end(self) -> None:
        """Wait until it has ended. It does at its next word, if nobody listens."""
        self.words.close()
        os.waitpid(self._pid, 0)

    def _report(self, report: pytest.TestReport) -> None:
        hook = self._session.config.hook
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _lost(self) -> pytest.Item:
        """Return the test that was the next to be told of; of none left, the last of all."""
        return self._left[0] if self._left else self._session.items[-1]


class Teller:
    """Tells the process that reports what became of each test; stands where pytest looks for what
    writes to the terminal."""

    def __init__(self, config: pytest.Config, told: Connection) -> None:
        self._tw = config.get_terminal_writer()
        self._config = config
        self._told = told
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the report of one phase."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self) -> None:
        """Tell of a whole test."""
        reports, self._reports = self._reports, []
        if [one.when for one in reports if _is_plain(one)] == ["setup", "call", "teardown"]:
            self._told.send(float(sum(one.duration for one in reports)))
            return
        told = self._config.hook.pytest_report_to_serializable
        self._told.send([told(config=self._config, report=one) for one in reports])


def _is_plain(report: pytest.TestReport) -> bool:
    """Tell whether nothing is to be said of a phase but that it passed."""
    is_more = report.user_properties or hasattr(report, "wasxfail")
    return type(report) is pytest.TestReport and report.passed and not is_more


def _report(
    item: pytest.Item, outcome: Any, longrepr: str | None, duration: float = 0.0
) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, {}, outcome, longrepr, "call", duration=duration
    )


def _taken(modules: Sequence[Module], line: int, told: Connection) -> Iterator[pytest.Item]:
    """Yield the tests of the modules that nobody else has taken."""
    while number := os.read(line, _NUMBER):
        told.send(int.from_bytes(number, "big"))
        yield from modules[int.from_bytes(number, "big")]


def _work(
    session: pytest.Session, number: int, items: Iterator[pytest.Item], told: Connection
) -> NoReturn:
    """Run tests as a process of its own, and end it."""
    code = 1
    errors = os.fdopen(os.dup(2), "w")
    try:
        _part_from_parent(session.config, number, told)
        for item, after in pairwise(chain(items, [None])):
            assert item is not None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail or session.shouldstop:
                break
        session.config._ensure_unconfigure()
        atexit._run_exitfuncs()
        told.send(None)
        code = 0
    except (BrokenPipeError, KeyboardInterrupt):
        code = 2  # nobody listens any more
    except BaseException:
        traceback.print_exc(file=errors)
        errors.flush()
    finally:
        os._exit(code)


def _part_from_parent(config: pytest.Config, number: int, told: Connection) -> None:
    """Share no file with the other processes but the line of modules."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    # A server of a test may say something between two tests, when nothing is captured.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    if capture is not None:
        capture.start_global_capturing()
        capture.suspend_global_capture()
    directories = config._tmp_path_factory  # type: ignore[attr-defined]
    directories._basetemp = directories.mktemp(f"process{number}", numbered=False)
    teller = Teller(config, told)
    for name in ("terminalreporter", "terminalprogress"):
        if config.pluginmanager.hasplugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(teller, "terminalreporter")
