"""The pytest plugin: the fixture `conveyor_server`, and the marker `conveyor`. It imports heavy
modules only when they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conveyor.testing.server import ConveyorServer

MARKER = (
    "conveyor(clock='system', clock_start='', settings={}): the clock and the settings of the "
    "fixture conveyor_server; with clock='manual' the test moves its clock"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def conveyor_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConveyorServer]:
    """A Conveyor server for this test alone: free port, temporary directory, fake gateway."""
    from conveyor.testing.server import conveyor_server as boot

    marker = request.node.get_closest_marker("conveyor")
    words = dict(marker.kwargs) if marker is not None else {}
    settings = words.pop("settings", {})
    unknown = words.keys() - {"clock", "clock_start", "workers"}
    if unknown or (marker is not None and marker.args):
        raise pytest.UsageError(f"the marker is {MARKER.partition(':')[0]}")
    if words.get("clock", "system") not in ("system", "manual", "auto"):
        raise pytest.UsageError("the clock of the marker is system, manual or auto")
    with boot(tmp_path_factory.mktemp("conveyor"), **words, **settings) as server:
        yield server
