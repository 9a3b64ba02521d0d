"""`conveyor-dev` as a child whose output goes to files: it may say as much as it likes, and a test
can look through every byte of it afterwards."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from conveyor.roles.dev import ServerInfo
from conveyor.settings import PREFIX
from tests.acceptance.support_commands import Fork, forks
from tests.disk import files_below

BOOT_SECONDS = 60.0
END_SECONDS = 60.0
_POLL = 0.02


@dataclass(frozen=True)
class Booted:
    """A running server. `api` ends in /v1; `origin` is the address without it, `inbox` the URL of
    its receiver."""

    api: str
    pid: int
    data_dir: Path
    stdout: Path
    stderr: Path
    inbox: str = ""

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return self.api.removesuffix("/v1")

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.origin.rpartition(":")[2])

    def output(self) -> bytes:
        """All it has written so far, on both streams."""
        return self.stdout.read_bytes() + self.stderr.read_bytes()

    def files(self) -> list[Path]:
        """The files of bodies that are stored, and whatever was left beside them."""
        return list(files_below(self.data_dir / "blobs"))

    def memory(self, which: str) -> int:
        """Bytes of memory, by a name of /proc/PID/status: VmRSS now, VmHWM at most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{which}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, status
        return int(found[1]) * 1_024


@contextmanager
def boot(directory: Path, *flags: str, **settings: object) -> Iterator[Booted]:
    """A server over `directory / "data"`, which it makes; ended in order at the exit.

    `settings` are names of Settings, handed over as CONVEYOR_… variables. Nothing else of that
    kind, and no proxy, is taken from the environment of the tests.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stdout, stderr = directory / "stdout", directory / "stderr"
    data = directory / "data"
    arguments = ["--port", "0", "--json", "--data-dir", str(data), *flags]
    with stdout.open("wb") as out, stderr.open("wb") as err, open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), out.fileno(), err.fileno()]
        child = forks().start("conveyor-dev", arguments, _environment(settings), streams)
    try:
        info = _ready(child, stdout, stderr)
        yield Booted(info.api, info.pid, data, stdout, stderr, info.inbox)
        child.send_signal(signal.SIGTERM)
        code = child.wait(END_SECONDS)
        assert code == 0, f"ended with {code}: {stderr.read_text(errors='replace')[-2_000:]}"
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _environment(settings: dict[str, object]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and not name.lower().endswith("_proxy")
    }
    return kept | {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}


def _ready(child: Fork, stdout: Path, stderr: Path) -> ServerInfo:
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        line = stdout.read_bytes()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=ServerInfo)
        time.sleep(_POLL)
    raise RuntimeError(f"no server: {stderr.read_text(errors='replace')}")
