"""A role of production with faults, for tests of fleets.

    python -m conveyor.testing.chaos_role worker --ahead 30 --seed s --rate 0.02 --log FILE

Its settings come from the environment, as those of `conveyor worker`; its ports are free ones, and
it prints one line of JSON when it is ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from ulid import ULID

from conveyor.bootstrap.loop import webhooks_of
from conveyor.bootstrap.production import open_role
from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import Aws
from conveyor.roles.production import RoleInfo, run
from conveyor.settings import ROLES, from_environment
from conveyor.testing.aws_faults import AwsTrouble, TroubledAws

MODULE = "conveyor.testing.chaos_role"


class ClockAhead(SystemClock):
    """The system's clock, set ahead by some seconds, or back if negative. Monotonic time is
    unchanged."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._ahead = round(seconds * 1_000)

    def now(self) -> int:
        """Return milliseconds since the epoch, UTC, by this clock."""
        return super().now() + self._ahead

    def new_id(self) -> str:
        """Return a new ULID for that instant."""
        return str(ULID.from_timestamp(self.now()))


def main(arguments: Sequence[str]) -> int:
    """Run the role until a signal; return the exit code."""
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument(
        "--ahead", type=float, default=0.0, help="seconds to set the wall clock ahead"
    )
    parser.add_argument("--seed", default="", help="seed of the AWS faults")
    parser.add_argument("--rate", type=float, default=0.0, help="share of calls with a fault")
    parser.add_argument("--log", type=Path, help="file to write each fault to")
    parser.add_argument("--loopback", action="store_true", help="post events to this machine too")
    chosen = parser.parse_args(arguments)
    clock = ClockAhead(chosen.ahead)
    log: Path | None = chosen.log

    def record(trouble: AwsTrouble) -> None:
        if log is not None:
            with log.open("ab") as file:
                file.write(msgspec.json.encode(trouble) + b"\n")

    def troubled(aws: Aws) -> Aws:
        return TroubledAws(aws, clock, seed=chosen.seed, rate=chosen.rate, on_fault=record)

    settings = from_environment(
        production=True, role=chosen.role, host="127.0.0.1", port=0, metrics_port=0
    )
    opened = partial(
        open_role,
        seam=troubled if chosen.rate else None,
        webhooks=webhooks_of(settings, clock, loopback=True) if chosen.loopback else None,
    )
    try:
        return run(settings, on_ready=_say, clock=clock, opened=opened)
    except ConveyorError as error:
        sys.stderr.write(f"{error.detail}\n")
        return 1


def _say(info: RoleInfo) -> None:
    sys.stdout.write(f"{msgspec.json.encode(info).decode()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
