"""An ordinary production role that counts its calls by purpose.

    python -m bench.aws_role api|worker [POLICY]

A worker runs under a permit policy of the simulation, `reserve` by default. Settings come from the
environment, as those of `conveyor`; ports are free ones. Calls are counted at the seam that every
call of AWS goes through, scripts and values of Redis at its client. With BENCH_PURPOSES=off nobody
looks up who makes a call, which takes CPU of the role. The first line on standard output says that
the role is ready. For each line on standard input it says its counts, as JSON; it ends with its
input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from bench.aws_purposes import purpose
from bench.cpu_samples import let_be_sampled
from conveyor.bootstrap.production import open_role
from conveyor.prod import binding
from conveyor.prod.aws.boto import BotoCarrier
from conveyor.prod.aws.calls import Answer, Aws, CallStats, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.http import HttpCarrier
from conveyor.prod.redis.permits import ALL, HOLD, LEAVE, SAY
from conveyor.prod.redis.server import RedisServer, Script
from conveyor.roles.production import RoleInfo, run
from conveyor.settings import from_environment
from conveyor.simulation.policies import policy_factory


class Look(msgspec.Struct, frozen=True):
    """Counts since the start of a role.

    `calls` are by "service operation (purpose)", with failed attempts apart as "tries again";
    `units` are DynamoDB's; `messages` were received, `again` of them not for the first time.
    """

    calls: dict[str, int]
    units: float
    messages: int
    again: int


class Counts:
    """The calls of this process, counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.messages = 0
        self.again = 0
        self.stats = CallStats()

    def look(self) -> Look:
        """Return all counts up to now."""
        calls = {**self.calls, "tries again": sum(self.stats.retries.values())}
        return Look(calls, sum(self.stats.capacity.values()), self.messages, self.again)

    def received(self, answer: Answer) -> None:
        """Count messages from the queue of a run."""
        for message in answer.get("Messages", []):
            self.messages += 1
            self.again += int(message["Attributes"]["ApproximateReceiveCount"]) > 1


COUNTS = Counts()
_BY_PURPOSE = os.environ.get("BENCH_PURPOSES") != "off"
_MESSAGES = {
    "receive_message": "tasks",
    "send_message_batch": "references",
    "delete_message_batch": "acknowledgements",
    "change_message_visibility_batch": "renewed, hidden or given back",
}
"""The purposes of operations on many of a run's messages at a time, whoever calls them."""


class CountedAws:
    """A transport that counts calls."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Count a call, and make it."""
        of_run = "-run-" in str(parameters.get("QueueUrl", ""))
        if operation in _MESSAGES:
            what = _MESSAGES[operation] if of_run else "control"
        else:
            what = purpose() if _BY_PURPOSE else "any"
        COUNTS.calls[f"{service} {operation} ({what})"] += 1
        answer = await self._aws.call(service, operation, parameters)
        if operation == "receive_message" and of_run:
            COUNTS.received(answer)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Return a link: that is not a call."""
        return self._aws.presign(operation, parameters, seconds=seconds)


_SCRIPTS = {HOLD: "permits", SAY: "reports", LEAVE: "reports", ALL: "reports"}


class CountedRedis(RedisServer):
    """A client of Redis that counts calls."""

    async def run(self, script: Script, key: str, *arguments: str | int | float | bytes) -> Any:
        """Count a script, and run it."""
        COUNTS.calls[f"redis script ({_SCRIPTS.get(script, 'request rates')})"] += 1
        return await super().run(script, key, *arguments)

    async def get(self, key: str) -> bytes | None:
        """Count a read, and read."""
        COUNTS.calls["redis get (templates)"] += 1
        return await super().get(key)

    async def put(self, key: str, value: bytes, *, seconds: int) -> None:
        """Count a write, and write."""
        COUNTS.calls["redis set (templates)"] += 1
        await super().put(key, value, seconds=seconds)


class Named:
    """A client of one service with method names that show the operation in a sample of the
    stack."""

    def __init__(self, service: str, client: Any) -> None:
        self._service = service
        self._client = client
        self._calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("close", "generate_presigned_url", "meta") or name.startswith("_"):
            return getattr(self._client, name)
        if name not in self._calls:
            self._calls[name] = named_call(self._service, name, getattr(self._client, name))
        return self._calls[name]


def named_call(service: str, operation: str, call: Any) -> Any:
    """Make a function that makes a call, named after the operation, in the file `<service>`."""

    def made(**parameters: Any) -> Any:
        return call(**parameters)

    code, file = made.__code__, f"<{service}>"
    made.__code__ = code.replace(co_name=operation, co_qualname=operation, co_filename=file)
    return made


def counted(aws: Aws) -> Aws:
    """Wrap the transport between the adapters and AWS."""
    if isinstance(aws, AwsClient):
        COUNTS.stats = aws.stats
        boto = aws.carrier.boto if isinstance(aws.carrier, HttpCarrier) else aws.carrier
        assert isinstance(boto, BotoCarrier)
        clients = boto.clients
        for name, client in list(clients.items()):
            clients[name] = Named(name, client)
    return CountedAws(aws)


def _report() -> None:
    """Print the counts for each line of input until it ends."""
    for _ in sys.stdin:
        sys.stdout.write(msgspec.json.encode(COUNTS.look()).decode() + "\n")
        sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def _say(info: RoleInfo) -> None:
    sys.stdout.write(msgspec.json.encode(info).decode() + "\n")
    sys.stdout.flush()
    threading.Thread(target=_report, daemon=True).start()


def main(role: str, policy: str = "reserve") -> int:
    """Run the role until a signal; return the exit code."""
    let_be_sampled()
    vars(binding)["RedisServer"] = CountedRedis
    settings = from_environment(
        production=True,
        role=role,
        host="127.0.0.1",
        port=0,
        metrics_host="127.0.0.1",
        metrics_port=0,
    )
    opened = partial(open_role, seam=counted, policy=policy_factory(policy))
    return run(settings, on_ready=_say, opened=opened)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
