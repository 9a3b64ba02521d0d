"""Tools for tests. `server()` runs a server inside the process of a test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conveyor.testing.local_server import ServerRun


def server(
    data_dir: Path | None = None,
    *,
    clock: str = "system",
    clock_start: str = "",
    recording: Path | str = "",
    **settings: Any,
) -> ServerRun:
    """Return a server to run: `with server() as …`, or `async with`, give a ConveyorServer.

    It is silent, on a free port, over the fake gateway, in `data_dir`, by default a directory that
    is removed, and reads nothing from the environment; `settings` are fields of `Settings`. With
    `clock="manual"` the test moves its clock, which starts at `clock_start`, by default the
    present; attempts then wait as long as in production. With a `recording` it answers from that
    directory. With `gateway="direct"`, or a URL, it calls that gateway, to be recorded.
    """
    from conveyor.testing.local_server import ServerRun

    return ServerRun(
        data_dir, clock=clock, clock_start=clock_start, recording=recording, settings=settings
    )
