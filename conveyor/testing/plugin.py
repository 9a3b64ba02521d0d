"""The pytest plugin: servers as fixtures, the marker `conveyor`, and a section on the server in the
report of a test that failed. It imports heavy modules only when they are used."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conveyor.testing.local_server import ConveyorServer

MARKER = (
    "conveyor(clock='system', clock_start='', workers=8, recording='', settings={}): the clock, "
    "the recording to answer from and the settings of the fixture conveyor_server; with "
    "clock='manual' the test moves its clock"
)
_FIXTURES = ("conveyor_server", "conveyor_shared")
_SERVERS = pytest.StashKey["list[ConveyorServer]"]()
"""The servers of a test, also those that only its fixtures use."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def conveyor_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConveyorServer]:
    """A Conveyor server for this test alone: free port, temporary directory, fake gateway."""
    from conveyor.testing import server

    with server(tmp_path_factory.mktemp("conveyor"), **_marked(request)) as booted:
        _note(request, booted)
        yield booted


@pytest.fixture(scope="session")
def conveyor_shared_options() -> dict[str, Any]:
    """Arguments of `conveyor.testing.server` for the shared server, such as clock="manual";
    override it in your conftest.py."""
    return {}


@pytest.fixture(scope="session")
def _conveyor_session(
    conveyor_shared_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConveyorServer]:
    from conveyor.testing import server

    with server(tmp_path_factory.mktemp("conveyor"), **conveyor_shared_options) as booted:
        yield booted


@pytest.fixture
def conveyor_shared(
    request: pytest.FixtureRequest, _conveyor_session: ConveyorServer
) -> Iterator[ConveyorServer]:
    """One Conveyor server for all tests of a process, emptied after each."""
    if request.node.get_closest_marker("conveyor") is not None:
        text = "the marker conveyor is for conveyor_server: override conveyor_shared_options"
        raise pytest.UsageError(text)
    _note(request, _conveyor_session)
    yield _conveyor_session
    _conveyor_session.reset()


@pytest.fixture
def conveyor_environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The variables that lead a program to the server of this test, set: of conveyor_shared, if the
    test uses it, else of conveyor_server."""
    is_shared = "conveyor_shared" in request.fixturenames
    server: ConveyorServer = request.getfixturevalue(_FIXTURES[is_shared])
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.environment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a section to the report of a test that failed: what its server knows."""
    report = yield
    module = sys.modules.get("conveyor.testing.local_server")
    if module is not None and report.failed and report.when != "teardown":
        known = [*item.stash.get(_SERVERS, []), *getattr(item, "funcargs", {}).values()]
        servers = [one for one in known if isinstance(one, module.ConveyorServer)]
        told = {one.origin: one.report() for one in servers}
        report.sections += [(f"conveyor at {origin}", text) for origin, text in told.items()]
    return report


def _note(request: pytest.FixtureRequest, server: ConveyorServer) -> None:
    """Note that a test has a server, until the fixture ends."""
    servers = request.node.stash.setdefault(_SERVERS, [])
    servers.append(server)
    request.addfinalizer(lambda: servers.remove(server))


def _marked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what the marker of a test says. Raises UsageError for words that it does not have."""
    marker = request.node.get_closest_marker("conveyor")
    words = dict(marker.kwargs) if marker is not None else {}
    settings = words.pop("settings", {})
    unknown = words.keys() - {"clock", "clock_start", "recording", "workers"}
    if unknown or (marker is not None and marker.args):
        raise pytest.UsageError(f"the marker is {MARKER.partition(':')[0]}")
    if words.get("clock", "system") not in ("system", "manual", "auto"):
        raise pytest.UsageError("the clock of the marker is system, manual or auto")
    return {**words, **settings}
