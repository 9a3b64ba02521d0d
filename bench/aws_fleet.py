"""Production roles over emulators, with counts of their calls, messages and CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.conveyor_server import API_KEY
from bench.processes import cpu_seconds
from conveyor.roles.production import RoleInfo
from conveyor.testing.fleet import END_SECONDS, FleetServices, FleetSize, RoleFleet

_ROLE = (sys.executable, "-m", "bench.aws_role")
_GATEWAY = (sys.executable, "-m", "conveyor.testing.gateway_server", "--port", "0")


def services(*, redis: bool = True) -> FleetServices:
    """Return the emulators that `scripts/emulators run` has started; permits in Redis, or in
    DynamoDB."""
    names = ("dynamodb", "sqs", "s3", "stepfunctions", *(["redis"] if redis else []))
    return FleetServices(**{name: os.environ[f"CONVEYOR_TEST_{name.upper()}"] for name in names})


@dataclass(slots=True)
class Used:
    """The use of resources within some time. `units` are of DynamoDB; `messages` were received from
    the queues of runs, `again` of them not for the first time."""

    calls: Counter[str] = field(default_factory=Counter)
    units: float = 0.0
    cpu: float = 0.0
    messages: int = 0
    again: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.calls + other.calls,
            self.units + other.units,
            self.cpu + other.cpu,
            self.messages + other.messages,
            self.again + other.again,
        )

    def __sub__(self, other: Used) -> Used:
        return Used(
            self.calls - other.calls,
            self.units - other.units,
            self.cpu - other.cpu,
            self.messages - other.messages,
            self.again - other.again,
        )


class Role:
    """One role as a process of its own."""

    def __init__(self, role: str, log: Path, environment: Mapping[str, str], policy: str) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                [*_ROLE, role, policy],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._seen = Used()
        self.info = RoleInfo(role=role, pid=0, metrics="")

    def ready(self) -> None:
        """Wait until it is ready. Raises RuntimeError with its last output if it ends instead."""
        self.info = msgspec.json.decode(self._answer(), type=RoleInfo)
        self.used()

    def used(self) -> Used:
        """Return its use since the last call."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        counts = json.loads(self._answer())
        now = Used(
            Counter(counts["calls"]),
            counts["units"],
            cpu_seconds([self._child.pid]),
            counts["messages"],
            counts["again"],
        )
        before, self._seen = self._seen, now
        return now - before

    def end(self) -> None:
        """End it with SIGTERM, and kill it if it does not end in time."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a role has ended: {self._log.read_text(errors='replace')[-2_000:]}"
            )
        return line


class Api:
    """A lean client of an API."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request below /v1; return the decoded answer."""
        headers = {"X-API-Key": API_KEY, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._address}{path}", data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    def run(self, job_id: str) -> Any:
        """Return the latest run of a job."""
        return self.call("GET", f"/jobs/{job_id}")["latest_run"]


@dataclass(frozen=True, slots=True)
class Watched:
    """One ready api and some workers, and the scripted gateway behind them."""

    api: Api
    apis: Sequence[Role]
    workers: Sequence[Role]
    gateway: str

    def peak_in_flight(self) -> int:
        """Return the maximum of concurrent gateway calls."""
        url = f"http://{urlsplit(self.gateway).netloc}/hits"
        with urllib.request.urlopen(url, timeout=30) as answer:
            peak: int = json.loads(answer.read())["peak_in_flight"]
        return peak


@contextmanager
def watched(
    directory: Path,
    *,
    workers: int,
    settings: Mapping[str, Any],
    redis: bool = True,
    policy: str = "reserve",
    by_purpose: bool = True,
) -> Iterator[Watched]:
    """Make an environment and start its roles with fields of Settings; remove everything
    afterwards. Calls are counted by purpose, or by service and operation alone."""
    directory.mkdir(parents=True, exist_ok=True)
    counting = {} if by_purpose else {"BENCH_PURPOSES": "off"}
    with ExitStack() as stack:
        url = stack.enter_context(_gateway())
        fleet = stack.enter_context(
            RoleFleet(
                services(redis=redis),
                gateway=url,
                directory=directory,
                inherited=os.environ,
                size=FleetSize(apis=0, workers=0),
                log_level="warning",
                shutdown_grace=2,
                **settings,
            )
        )
        roles: list[Role] = []
        for role in ("api", *["worker"] * workers):
            log = directory / f"{role}-{len(roles)}.log"
            roles.append(Role(role, log, {**fleet.environment, **counting}, policy))
            stack.callback(roles[-1].end)
        for started in roles:
            started.ready()
        yield Watched(Api(roles[0].info.api), roles[:1], roles[1:], url)


@contextmanager
def _gateway() -> Iterator[str]:
    with subprocess.Popen(_GATEWAY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()
