"""A fleet of production over emulators, where a test would else boot a development server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from conveyor.testing.fleet import FleetServices, FleetSize, RoleFleet, Trouble
from tests.acceptance.support_bindings import FLEET
from tests.acceptance.support_boot import boot
from tests.conformance.emulators import PREFIX, address

APIS, WORKERS = 2, 4
_GATEWAY = (sys.executable, "-m", "conveyor.testing.gateway_server", "--port", "0")


def services() -> FleetServices:
    """Return the services of this test run; skip the test if one is unavailable."""
    return FleetServices(**{name: address(f"{PREFIX}{name.upper()}") for name in _NAMES})


@contextmanager
def serving_gateway() -> Iterator[str]:
    """The scripted gateway as a process of its own, the same for every worker: its URL."""
    with subprocess.Popen(_GATEWAY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline())["url"]
        finally:
            process.kill()


@contextmanager
def fleet(
    directory: Path,
    *,
    apis: int = APIS,
    workers: int = WORKERS,
    over: FleetServices | None = None,
    trouble: Trouble = lambda _role, _number: (),
    **settings: object,
) -> Iterator[RoleFleet]:
    """A fleet over the scripted gateway; `over` other services than those of the tests. `settings`
    are fields of Settings, `trouble` as Fleet takes it."""
    chosen: dict[str, Any] = {
        "log_level": "warning",
        "discovery_interval": 2,
        "permit_lease": 10,
        "retry_base": 0.01,
        "shutdown_grace": 5,
        **settings,
    }
    with (
        serving_gateway() as gateway,
        RoleFleet(
            over or services(),
            gateway=gateway,
            directory=directory,
            inherited=os.environ,
            size=FleetSize(apis=apis, workers=workers),
            trouble=trouble,
            **chosen,
        ) as running,
    ):
        yield running


@contextmanager
def direct_fleet(
    directory: Path,
    *,
    workers: int,
    trouble: Trouble = lambda _role, _number: (),
    **settings: object,
) -> Iterator[RoleFleet]:
    """A fleet with one API, whose gateway fetches sites of this machine by itself. `settings` are
    fields of Settings, `trouble` as Fleet takes it."""
    chosen: dict[str, Any] = {"log_level": "warning", "discovery_interval": 2, **settings}
    with RoleFleet(
        services(),
        gateway="direct",
        directory=directory,
        inherited=os.environ,
        size=FleetSize(apis=1, workers=workers),
        trouble=trouble,
        allow_private=True,
        **chosen,
    ) as running:
        yield running


@contextmanager
def serving_direct(
    binding: str, directory: Path, *, workers: int, **settings: object
) -> Iterator[tuple[str, str]]:
    """A development server, or a fleet of so many workers, that fetches sites of this machine by
    itself: its API, and the address of a worker's metrics."""
    if binding != FLEET:
        flags = ("--gateway", "direct", "--allow-private")
        with boot(directory, *flags, **settings) as server:
            yield server.api, server.api.removesuffix("/v1")
        return
    chosen: dict[str, Any] = settings
    with direct_fleet(directory, workers=workers, **chosen) as running:
        yield running.api, str(running.workers[0].info.metrics)


_NAMES = ("dynamodb", "sqs", "s3", "stepfunctions", "redis")
