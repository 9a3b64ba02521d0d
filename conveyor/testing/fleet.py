"""A fleet of production roles, each a process of its own, over services on this machine.

    with RoleFleet(services, gateway=url, directory=tmp_path, inherited=environment) as fleet:
        ZenRowsBatchClient("key", base_url=fleet.api)

The environment has a name of its own, made by `conveyor admin init` and removed at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from conveyor.clock import SystemClock
from conveyor.roles.production import RoleInfo
from conveyor.settings import PREFIX
from conveyor.testing import chaos_role
from conveyor.testing.load_balancer import LoadBalancer, load_balancer

PROGRAM = (sys.executable, "-m", "conveyor")
TROUBLED = (sys.executable, "-m", chaos_role.MODULE)
BOOT_SECONDS = 60.0
END_SECONDS = 40.0
SECRET = "the root secret of a fleet that lives for one test"
_POLL = 0.02

Trouble = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetServices:
    """The addresses of AWS's services and of Redis; "" for AWS's own. Without a Redis, permits are
    kept in DynamoDB."""

    dynamodb: str = ""
    sqs: str = ""
    s3: str = ""
    stepfunctions: str = ""
    redis: str = ""


class RoleProcess:
    """One process of a fleet. Its output goes to files, so that it may write as much as it likes.

    `trouble`: options of `conveyor.testing.chaos_role`, which then is the program.
    """

    def __init__(
        self, role: str, log: Path, environment: Mapping[str, str], *, trouble: Sequence[str] = ()
    ) -> None:
        self.role = role
        self.log = log
        self._trouble = tuple(trouble)
        self.info = RoleInfo(role=role, pid=0, metrics="")
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to boot, or boot again after it has ended. `ready` waits for it."""
        if self._trouble:
            command = [*TROUBLED, self.role, *self._trouble]
        else:
            command = [*PROGRAM, self.role, "--json", "--metrics-port", "0"]
            command += ["--host", "127.0.0.1", "--port", "0"] if self.role == "api" else []
        with self._ready_file.open("wb") as out, self.log.open("ab") as errors:
            self._child = subprocess.Popen(
                command, stdout=out, stderr=errors, env=self._environment
            )

    def ready(self) -> RoleInfo:
        """Wait until it is ready. Raises RuntimeError with its last output if it ends before."""
        clock = SystemClock()
        deadline = clock.monotonic() + BOOT_SECONDS
        while clock.monotonic() < deadline and self._running.poll() is None:
            line = self._ready_file.read_bytes()
            if line.endswith(b"\n"):
                self.info = msgspec.json.decode(line, type=RoleInfo)
                return self.info
            self._wait_a_moment()
        raise RuntimeError(f"no {self.role}: {self.log.read_text(errors='replace')[-2_000:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._running.send_signal(number)

    def kill(self) -> None:
        """Send it kill -9, unless it has ended."""
        if self._running.poll() is None:
            self._running.kill()
        self._running.wait()

    def end(self) -> int:
        """End it with SIGTERM; return its exit code, or -9 if it had to be killed after a time."""
        if self._running.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self._running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._running.returncode

    @property
    def alive(self) -> bool:
        """Return whether it runs, ready or not."""
        return self._child is not None and self._child.poll() is None

    @property
    def _ready_file(self) -> Path:
        return self.log.with_suffix(".ready")

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError("it has not been started")
        return self._child

    def _wait_a_moment(self) -> None:
        try:
            self._running.wait(_POLL)
        except subprocess.TimeoutExpired:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """The number of processes of each role, and of gateway calls that a worker makes at a time."""

    apis: int = 2
    workers: int = 4
    slots: int = 50


DEFAULT_SIZE = FleetSize()


class RoleFleet:
    """API servers behind one address, and workers. Ready once entered; ended, and its environment
    removed, once left.

    `settings` are fields of Settings for every process; `gateway` is the URL of a scraping API.
    `trouble` returns the options of `conveyor.testing.chaos_role` for a role and its number, or
    none for an ordinary process of production. The processes inherit the `inherited` environment
    except settings and proxies.
    """

    def __init__(
        self,
        services: FleetServices,
        *,
        gateway: str,
        directory: Path,
        inherited: Mapping[str, str],
        size: FleetSize = DEFAULT_SIZE,
        trouble: Trouble = lambda _role, _number: (),
        **settings: object,
    ) -> None:
        self.name = f"test-{SystemClock().new_id().lower()}"
        self.directory = directory
        self._trouble = trouble
        directory.mkdir(parents=True, exist_ok=True)
        self.environment = _without_settings(inherited) | self._environment(
            services, {"gateway": gateway, "workers": size.slots, **settings}
        )
        self.apis = [self._process("api", number) for number in range(size.apis)]
        self.workers = [self._process("worker", number) for number in range(size.workers)]
        self.front = LoadBalancer([])
        self.api = ""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.admin("init")
        self._stack.callback(self.admin, "destroy", "--yes", self.name, "--even-if-alive")
        try:
            for process in self.processes:
                process.start()
                self._stack.callback(process.kill)
            for process in self.processes:
                process.ready()
            port, self.front = self._stack.enter_context(load_balancer(self._addresses()))
        except BaseException:
            self._stack.close()
            raise
        self.api = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(self, *_error: object) -> None:
        with self._stack:
            for process in self.processes:
                if process.alive:
                    process.signal(signal.SIGCONT)
                    process.signal(signal.SIGTERM)
            for process in self.processes:
                if process.alive:
                    process.end()

    @property
    def processes(self) -> list[RoleProcess]:
        """Return all processes."""
        return [*self.apis, *self.workers]

    def restart(self, process: RoleProcess) -> None:
        """Start a process that has ended, and wait until it is ready."""
        process.start()
        process.ready()
        self.front.servers = self._addresses()

    def admin(self, *arguments: str) -> str:
        """Return the output of `conveyor admin …`. Raises RuntimeError if it fails."""
        ended = subprocess.run(
            [*PROGRAM, "admin", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=BOOT_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"conveyor admin {arguments[0]}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def output(self) -> bytes:
        """Return all output of its processes up to now."""
        return b"".join(process.log.read_bytes() for process in self.processes)

    def _process(self, role: str, number: int) -> RoleProcess:
        log = self.directory / f"{role}-{number}.log"
        return RoleProcess(role, log, self.environment, trouble=self._trouble(role, number))

    def _addresses(self) -> list[tuple[str, int]]:
        origins = [urlsplit(process.info.api) for process in self.apis if process.alive]
        return [(origin.hostname or "", origin.port or 0) for origin in origins]

    def _environment(
        self, services: FleetServices, settings: Mapping[str, object]
    ) -> dict[str, str]:
        chosen: dict[str, object] = {
            "environment": self.name,
            "region": "us-east-1",
            "bucket": f"conveyor-{self.name}",
            "dynamodb_endpoint": services.dynamodb,
            "sqs_endpoint": services.sqs,
            "s3_endpoint": services.s3,
            "stepfunctions_endpoint": services.stepfunctions,
            "ledger": "redis" if services.redis else "dynamodb",
            "redis_url": services.redis,
            "secret": SECRET,
            "api_keys": "any",
            **settings,
        }
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in chosen.items()}


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) and not name.lower().endswith("_proxy")
    }
