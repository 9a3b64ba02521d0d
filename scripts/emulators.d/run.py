"""Starts emulators beside a command, or one until its holder goes.

    run.py ENVIRONMENT run COMMAND …   all of them, while the command runs
    run.py ENVIRONMENT hold SERVICE    one, until standard input ends; prints its addresses as JSON

Each gets a free port of loopback and a directory of its own, and ends with this program, however
that ends. The command finds them by CONVEYOR_TEST_DYNAMODB, _SQS, _S3, _REDIS, _STEPFUNCTIONS, _KMS
and _REDIS_SERVER (the program, for tests that start one of their own). A variable that is already
set is left alone, and its service is not started; with CONVEYOR_TEST_AWS=1 no AWS service is
started. An emulator that cannot be started is named; with CI set, that ends the program.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from programs import KEY, Emulator, emulators, free_port, redis_server

READY_SECONDS = 60.0
TRIES = 3
"""Attempts to start an emulator, each on other ports: another program may have taken one."""
PREFIX = "CONVEYOR_TEST_"
NOT_RUN, NOT_FOUND = 126, 127
"""Exit codes, as of a shell, for a command that cannot be run."""
_PR_SET_PDEATHSIG = 1


class Running:
    """Running emulators, each with a directory of its own; stopped and removed at the exit."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="conveyor-emulators-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._leftovers: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Their data is not kept, so they need not end in order.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        for path in self._leftovers:
            path.unlink(missing_ok=True)

    def start(self, emulator: Emulator) -> dict[str, str]:
        """Start one, wait until it answers, and return its addresses. Raises OSError with the
        reason."""
        for tried in range(1, TRIES + 1):
            try:
                return self._try_start(emulator, self._directory / f"{emulator.name}-{tried}")
            except ChildProcessError:
                if tried == TRIES:
                    raise
        raise AssertionError

    def _try_start(self, emulator: Emulator, directory: Path) -> dict[str, str]:
        directory.mkdir()
        port, log = free_port(), directory / "log"
        command = emulator.command(port, directory)
        # Keys, region and proxies of this process must not reach it: one emulator takes keys from
        # there.
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "TMPDIR": str(directory)}
        environment |= _filled(emulator.environment, port)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                # The terminal's Ctrl-C is for the command, which may still need the emulators.
                start_new_session=True,
                preexec_fn=_ends_with_parent(signal.SIGKILL),
            )
        self._processes.append(process)
        self._leftovers += emulator.leftovers(command)
        deadline = time.monotonic() + READY_SECONDS
        while process.poll() is None:
            try:
                emulator.ready(port)
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"it does not answer within {READY_SECONDS:g} s{_last_words(log)}"
                    ) from None
                time.sleep(0.02)
            else:
                return _filled(emulator.addresses, port)
        raise ChildProcessError(f"it ended with {process.returncode}{_last_words(log)}")


def run(venv: Path, command: list[str]) -> int:
    """Start all, run the command, end all; return the command's exit code."""
    environment = dict(os.environ)
    on_aws = environment.get(f"{PREFIX}AWS") == "1"
    with Running() as running:
        for emulator in emulators(venv):
            services = set(emulator.addresses) & {"REDIS"} if on_aws else set(emulator.addresses)
            if all(PREFIX + service in environment for service in services):
                continue
            try:
                addresses = running.start(emulator)
            except OSError as error:
                _report_missing(emulator, error)
                if environment.get("CI"):
                    return 1
                continue
            for service, address in addresses.items():
                environment.setdefault(PREFIX + service, address)
        try:
            environment.setdefault(f"{PREFIX}REDIS_SERVER", str(redis_server(venv)))
        except OSError as error:
            print(f"conveyor: NOT FOUND: {error}", file=sys.stderr)
        if not on_aws:
            environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}
            for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
                environment.pop(name, None)
        return _run(command, environment)


def hold(venv: Path, service: str) -> int:
    """Start the emulator of a service and keep it until standard input ends."""
    emulator = next(one for one in emulators(venv) if service in one.addresses)
    with Running() as running:
        try:
            addresses = running.start(emulator)
        except OSError as error:
            _report_missing(emulator, error)
            return 1
        print(json.dumps(addresses), flush=True)
        sys.stdin.buffer.read()
    return 0


def _run(command: list[str], environment: dict[str, str]) -> int:
    # The terminal sends Ctrl-C to the command; this program passes other signals on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=_ends_with_parent(signal.SIGTERM, interruptible=True),
        )
    except OSError as error:
        print(f"conveyor: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN

    def hand_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hand_on)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _filled(texts: Mapping[str, str], port: int) -> dict[str, str]:
    return {name: text.format(port=port) for name, text in texts.items()}


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-8:]
    return "".join(f"\n    {line}" for line in lines)


def _report_missing(emulator: Emulator, error: OSError) -> None:
    services = ", ".join(emulator.addresses)
    print(f"conveyor: NOT STARTED: {emulator.name} ({services}): {error}", file=sys.stderr)


def _ends_with_parent(number: signal.Signals, *, interruptible: bool = False) -> Callable[[], None]:
    """Make a function for the child to run first: it asks for a signal once this process is
    gone."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def ask() -> None:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:
                os.kill(os.getpid(), number)

    return ask


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    venv, what = Path(arguments[0]), arguments[1]
    try:
        return hold(venv, arguments[2]) if what == "hold" else run(venv, arguments[2:])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
