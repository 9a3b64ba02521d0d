"""A Redis or Valkey of a test's own, that may be stopped, killed and started anew."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from tests.conformance.emulators import redis_server

START_SECONDS = 20.0


class RedisProcess:
    """One server on loopback; `password` where it asks for one, `socket_path` where it listens at
    one too."""

    def __init__(
        self, directory: Path, *, password: str = "", socket_path: Path | None = None
    ) -> None:
        self._directory = directory
        self._password = password
        self._socket_path = socket_path
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        secret = f":{self._password}@" if self._password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, from the snapshot in its directory where there is one."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        options += ["--save", "", "--appendonly", "no"]
        if self._password:
            options += ["--requirepass", self._password]
        if self._socket_path is not None:
            options += ["--unixsocket", str(self._socket_path)]
        self._process = subprocess.Popen([redis_server(), *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.command("PING")
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.01)

    def command(self, *words: str) -> object:
        """One command, by a connection of its own."""
        with redis.Redis.from_url(self.url) as client:
            answer: object = client.execute_command(*words)
            return answer

    def pause(self) -> None:
        """Let it take connections, and answer nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once; nothing is saved."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
