"""The pytest plugin: the fixture `conveyor_server`. It imports heavy modules only when they are
used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conveyor.testing.server import ConveyorServer


@pytest.fixture
def conveyor_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    """A Conveyor server for this test alone: free port, temporary directory, fake gateway."""
    from conveyor.testing.server import conveyor_server as boot

    with boot(tmp_path_factory.mktemp("conveyor")) as server:
        yield server
