"""The commands of production where their extra is not installed: one line, no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
for name in ("boto3", "botocore", "redis"):
    sys.modules[name] = None
from conveyor.cli import main
main()
"""
ENVIRONMENT = {
    "CONVEYOR_ENVIRONMENT": "staging",
    "CONVEYOR_REGION": "eu-west-1",
    "CONVEYOR_BUCKET": "bucket",
    "CONVEYOR_LEDGER": "dynamodb",
    "CONVEYOR_SECRET": "a secret that is long enough to be one",
    "CONVEYOR_API_KEYS": "any",
    "CONVEYOR_PUBLIC_URL": "https://conveyor.test",
    "CONVEYOR_LOG_LEVEL": "error",
    # Those that the system gives away: nobody else here listens on them.
    "CONVEYOR_PORT": "0",
    "CONVEYOR_METRICS_PORT": "0",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["api", "worker", "admin init", "admin check", "admin dlq list"]
)
def test_what_is_missing_is_said_in_one_line(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split()],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        "conveyor: production needs boto3 and redis: install Conveyor with its extra, as [aws]\n"
    )
