"""Measures the CPU of calls to AWS over both carriers, side by side, with and without TLS.

The adapters of production call a server that answers at once, in a process of its own, 16 calls at
a time. A task is a claim, half a read, a put of 8 KB, a settlement, and a tenth of the calls that
receive and delete ten messages. The least of a few rounds counts.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import uvloop

from bench.certificates import ADDRESS, Certificates, write_certificates
from bench.harness import Figure, Options, Row
from conveyor.clock import SystemClock
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.s3.blobs import S3Blobs

IN_FLIGHT = 16
CALLS = 1_600
ROUNDS = 3
BODY = os.urandom(8_192)
ROW = {
    "pk": {"S": "Run#01KDVDNA00C42657VFQVC2R1YE#3"},
    "sk": {"S": "Task#0000000218F3B1FB964C048CBF"},
    "status": {"S": "processing"},
    "task": {"S": "x" * 700},
    "worker": {"S": "01KDVDNA00C42657VFQVC2R1YE"},
    "claimed_at": {"N": "1796000000000"},
    "shape": {"N": "3"},
}
MESSAGE = {
    "MessageId": "45bb084d-e879-48dd-bc91-bf52e0541c7b",
    "ReceiptHandle": "r" * 180,
    "MD5OfBody": "33fcd01258e6ba07ef405dc9e721f3a7",
    "Body": '{"i":17,"t":"0000000218F3B1FB964C048CBF"}',
    "Attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": "1796000000000"},
}
CONSUMED = {"TableName": "conveyor", "CapacityUnits": 1.0}
DONE = {"Successful": [{"Id": str(number)} for number in range(10)], "Failed": []}
ANSWERS: Mapping[str, Any] = {
    "UpdateItem": {"Attributes": ROW, "ConsumedCapacity": CONSUMED},
    "GetItem": {"Item": ROW, "ConsumedCapacity": CONSUMED},
    "ReceiveMessage": {"Messages": [MESSAGE] * 10},
    "DeleteMessageBatch": DONE,
}
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "s" * 40,
    "AWS_SESSION_TOKEN": "t" * 700,
}
"""Keys as those of a role, which have a token."""
WEIGHTS = {"claim": 1.0, "settle": 1.0, "get": 0.5, "put 8 KB": 1.0, "receive": 0.1, "delete": 0.1}
"""The calls of one task."""


class _Server(asyncio.Protocol):
    """One connection of the server: answers by the operation that a request names."""

    def __init__(self) -> None:
        self._held = b""
        self._answers = {f".{name}\r\n".encode(): _answer(said) for name, said in ANSWERS.items()}
        self._stored = (
            b'HTTP/1.1 200 OK\r\nx-amz-request-id: 1\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n'
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[: end + 2]
            length = head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            whole = end + 4 + int(length or 0)
            if len(self._held) < whole:
                return
            self._held = self._held[whole:]
            named = (one for name, one in self._answers.items() if name in head)
            self._transport.write(next(named, self._stored))


def _answer(said: Any) -> bytes:
    body = msgspec.json.encode(said)
    head = (
        "HTTP/1.1 200 OK\r\nServer: Server\r\nContent-Type: application/x-amz-json-1.0\r\n"
        f"Content-Length: {len(body)}\r\nx-amzn-RequestId: 45bb084d\r\n"
        f"x-amz-crc32: {zlib.crc32(body)}\r\n\r\n"
    )
    return head.encode() + body


async def serve(certificate: str, key: str) -> None:
    """Serve until the end of the standard input; say the ports without and with TLS."""
    loop = asyncio.get_running_loop()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    servers = [await loop.create_server(_Server, ADDRESS, 0, ssl=how) for how in (None, tls)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    sys.stdout.write(f"{ports[0]} {ports[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def _serving(files: Certificates) -> Iterator[tuple[str, str]]:
    """Return the URLs of a server, without and with TLS."""
    command = [sys.executable, "-m", "bench.aws_carriers", str(files.certificate), str(files.key)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        plain, over_tls = process.stdout.readline().split()
        try:
            yield f"http://{ADDRESS}:{plain}", f"https://{ADDRESS}:{over_tls}"
        finally:
            process.kill()


async def _take(url: str, carrier: str) -> dict[str, float]:
    """Return the milliseconds of CPU of each call, over one carrier."""
    options = AwsOptions(dynamodb_endpoint=url, sqs_endpoint=url, s3_endpoint=url, carrier=carrier)
    clock = SystemClock()
    aws = await open_aws(options, clock, "dynamodb", "sqs", "s3")
    table, blobs = Table(aws, "conveyor", clock), S3Blobs(aws, bucket="conveyor", clock=clock)
    key = Key("Run#01KDVDNA00C42657VFQVC2R1YE#3", "Task#0000000218F3B1FB964C048CBF")
    update = "SET #status = :status, claimed_at = :now, worker = :worker, task = :task"
    values: dict[str, Any] = {
        "status": "processing",
        "now": 1_796_000_000_000,
        "worker": "w",
        "task": "x" * 700,
    }
    queue = {"QueueUrl": "https://sqs.us-east-1.amazonaws.com/123456789012/conveyor-run-1"}
    entries = [{"Id": str(number), "ReceiptHandle": "r" * 180} for number in range(10)]
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "claim": lambda: table.update(key, update, condition="#status <> :status", **values),
        "settle": lambda: table.update(key, update, condition="worker = :worker", **values),
        "get": lambda: table.get(key),
        "put 8 KB": lambda: blobs.put("results/30/JOB/RUN/BODY", BODY),
        "receive": lambda: aws.call("sqs", "receive_message", {**queue, "WaitTimeSeconds": 2}),
        "delete": lambda: aws.call("sqs", "delete_message_batch", {**queue, "Entries": entries}),
    }
    try:
        return {name: await _least(call) for name, call in calls.items()}
    finally:
        await aws.aclose()


async def _least(call: Callable[[], Awaitable[Any]]) -> float:
    """Return the milliseconds of CPU that a call takes in the best of a few rounds."""
    await call()

    async def some() -> None:
        for _ in range(CALLS // IN_FLIGHT):
            await call()

    rounds = []
    for _ in range(ROUNDS):
        before = time.process_time()
        await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
        rounds.append(time.process_time() - before)
    return 1_000 * min(rounds) / CALLS


def measure(options: Options) -> list[Row]:
    """Measure each call over each carrier, then a task, and the ratio between both."""
    directory: Path = options.directory("aws_carriers")
    files = write_certificates(directory)
    given = {**KEYS, "AWS_CA_BUNDLE": str(files.authority)}
    rows: list[Row] = []
    with patch.dict(os.environ, given), _serving(files) as urls:
        for url in urls:
            name = "AWS over TLS" if url.startswith("https") else "AWS"
            taken = {carrier: uvloop.run(_take(url, carrier)) for carrier in ("boto", "http")}
            rows += table(name, taken["boto"], taken["http"])
    return rows


def table(name: str, boto: Mapping[str, float], http: Mapping[str, float]) -> list[Row]:
    """Build the rows of one kind of connection."""

    def row(what: str, old: float, new: float) -> Row:
        figures: dict[str, Figure] = {
            "boto, ms": round(old, 3),
            "http, ms": round(new, 3),
            "x": round(old / new, 1),
        }
        return Row(f"{name}: {what}", figures)

    whole = [sum(one[what] * share for what, share in WEIGHTS.items()) for one in (boto, http)]
    return [
        *[row(what, boto[what], http[what]) for what in WEIGHTS],
        row("a task", whole[0], whole[1]),
    ]


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:3]))
