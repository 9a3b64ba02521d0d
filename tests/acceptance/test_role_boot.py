"""A role that gets a signal while it opens: no service answers it yet, and it ends all the same."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from conveyor.testing.fleet import FleetServices, FleetSize, RoleFleet, RoleProcess
from tests.acceptance.support_wire import eventually

pytestmark = pytest.mark.server
PATIENCE = 60.0


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_role_that_is_told_to_end_while_aws_is_silent_ends_in_order(
    tmp_path: Path, role: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        process = booting(role, tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        asked, _ = silent.accept()
        with asked:
            process.signal(signal.SIGTERM)
            code = ended(process)
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):  # it was tried no second time
            silent.accept()

    said = process.log.read_text()
    assert code == 0, said
    assert "stopping" in said
    assert '"ready"' not in said
    assert "Traceback" not in said


def booting(role: str, directory: Path, aws: str) -> RoleProcess:
    """A role that begins to boot over this address, with a grace shorter than a call's timeout."""
    fleet = RoleFleet(
        FleetServices(dynamodb=aws, sqs=aws, s3=aws, stepfunctions=aws),
        gateway="fake",
        directory=directory,
        inherited={
            **os.environ,
            "AWS_ACCESS_KEY_ID": "of-nobody",
            "AWS_SECRET_ACCESS_KEY": "of-nobody",
        },
        size=FleetSize(apis=0, workers=0),
        shutdown_grace=1,
    )
    process = RoleProcess(role, directory / f"{role}.log", fleet.environment)
    process.start()
    return process


def ended(process: RoleProcess) -> int:
    """Wait for its end, without another signal; the exit code."""
    try:
        eventually(lambda: None if process.alive else True, "it ends", timeout=PATIENCE)
        return process.end()
    finally:
        process.kill()
