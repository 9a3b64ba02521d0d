"""The servers of acceptance tests: a development server, and a fleet of production over emulators.

A test that depends on `binding` runs once over each. A test that looks behind the server, into a
data directory or into a process, is marked `development_only(reason)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal
from zenrows import ZenRowsBatchClient

import conveyor.testing
from conveyor.testing.fleet import RoleFleet
from conveyor.testing.gateway_server import GatewayServer
from conveyor.testing.local_server import ConveyorServer
from tests.acceptance.support_bindings import BINDINGS, FLEET, Serving
from tests.acceptance.support_client import FLEET_SETTINGS, client_server, open_client
from tests.acceptance.support_fleet import fleet

FULL_OVER_FLEET = frozenset(
    {
        "test_exports_wire",
        "test_file_inputs",
        "test_file_inputs_bad",
        "test_ingest_cut_short",
        "test_inputs",
        "test_races",
    }
)
"""Modules whose run over a fleet is left to the full run: together they take minutes."""

QUICK_OVER_FLEET = frozenset({"test_a_regular_job_from_submit_to_results"})
"""Tests whose run over a fleet is in every run. A fleet takes many seconds to start."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark which runs over a fleet `./scripts/test` leaves to `--all`, and which to `--full`."""
    if not _over_fleet(item):
        return
    if item.path.stem in FULL_OVER_FLEET:
        item.add_marker(pytest.mark.full)
    elif getattr(item, "originalname", "") not in QUICK_OVER_FLEET:
        item.add_marker(pytest.mark.extended)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests for development alone, and run those that need a fleet last: one fleet
    serves many modules, and should not stand beside tests that do not need it."""
    for item in items:
        marker = item.get_closest_marker("development_only")
        if marker is not None and _over_fleet(item):
            item.add_marker(pytest.mark.skip(reason=f"development only: {marker.args[0]}"))
    items.sort(key=_over_fleet)


@pytest.fixture(scope="module", params=BINDINGS)
def binding(request: pytest.FixtureRequest) -> str:
    """Each binding in turn."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """The fleet of all modules that need no settings of their own. Its bodies are packed; those of
    most fleets with failing parts are not."""
    with fleet(tmp_path_factory.mktemp("fleet"), **FLEET_SETTINGS, pack_bodies="true") as running:
        yield running


@pytest.fixture(scope="module")
def server(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """The server of each binding in turn, for the published client."""
    if binding == FLEET:
        yield request.getfixturevalue("shared_fleet")
        return
    with client_server(tmp_path_factory.mktemp("client")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[ZenRowsBatchClient]:
    """The published client, at each binding in turn."""
    with open_client(server) as client:
        yield client


@pytest.fixture
def gateway() -> Iterator[GatewayServer]:
    """A scraping API that outlives the servers under test."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(GatewayServer()) as running,
    ):
        yield running


def _over_fleet(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    chosen = callspec is not None and callspec.params.get("binding") == FLEET
    return chosen or "shared_fleet" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ConveyorServer]:
    """A development server for the tests of a module."""
    with conveyor.testing.server() as server:
        yield server


@pytest.fixture
def emptied_server(shared_server: ConveyorServer) -> Iterator[ConveyorServer]:
    """The server of the module, emptied after each test, as the plugin's shared one."""
    yield shared_server
    shared_server.reset()
