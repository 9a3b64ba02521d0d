"""The queues that are always there, control and dead letters; and the removal of every queue."""

from __future__ import annotations

import json
import re
from typing import Any

from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.admin.finding import MADE
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.sqs.addresses import ABSENT, BLOCKED
from conveyor.prod.sqs.names import RETENTION, attributes, prefix

AGAIN = 65.0
"""Seconds after which the name of a deleted queue may be taken again."""

_OWN = re.compile(rf"{CONTROL_QUEUE}|{DEAD_LETTER_QUEUE}|run-(?:check-)?[0-9A-Za-z]{{26}}(?:-\d+)?")


class QueuesResource:
    """The queues of one environment."""

    def __init__(self, aws: Aws, clock: Clock, *, environment: str, max_receives: int) -> None:
        self._prefix = prefix(environment)
        self.what = f"queues {self._prefix}{CONTROL_QUEUE}, {self._prefix}{DEAD_LETTER_QUEUE}"
        self._aws = aws
        self._clock = clock
        self._max_receives = max_receives

    async def ensure(self) -> str:
        """Make them, or set them right: MADE where neither was there, else what was changed; empty:
        nothing. Waits for a name that was deleted a moment ago."""
        made: list[str] = []
        changes: list[str] = []
        for name in (DEAD_LETTER_QUEUE, CONTROL_QUEUE):
            url, wanted = await self._url(name), await self._wanted(name)
            if url is None:
                await self._make(name, wanted)
                made.append(f"made {self._prefix}{name}")
            elif wrong := _different(await self._attributes(url), wanted):
                await self._call("set_queue_attributes", QueueUrl=url, Attributes=wanted)
                changes.append(f"set {wrong} of {self._prefix}{name}")
        return MADE if len(made) == 2 else ", ".join(made + changes)

    async def problem(self) -> str | None:
        """What is wrong with them."""
        for name in (DEAD_LETTER_QUEUE, CONTROL_QUEUE):
            url = await self._url(name)
            if url is None:
                return f"{self._prefix}{name} does not exist (conveyor admin init makes it)"
            wrong = _different(await self._attributes(url), await self._wanted(name))
            if wrong:
                return f"{self._prefix}{name} has another {wrong} (conveyor admin init mends it)"
        return None

    async def remove(self) -> bool:
        """Remove them and every run's queue; whether there was any."""
        removed = False
        while urls := await self._own():
            for url in urls:
                try:
                    await self._call("delete_queue", QueueUrl=url)
                except AwsRefused as refused:
                    if refused.word not in ABSENT:
                        raise
            removed = True
            # A deleted queue may be listed for a while.
            await self._clock.sleep(1.0)
        return removed

    async def _own(self) -> list[str]:
        """The URLs of all queues of the environment, and of none whose name begins with its."""
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            answer = await self._call(
                "list_queues", QueueNamePrefix=self._prefix, MaxResults=1_000, **more
            )
            for url in answer.get("QueueUrls", []):
                name = url.rpartition("/")[2].removeprefix(self._prefix)
                if _OWN.fullmatch(name):
                    found.append(url)
            if not answer.get("NextToken"):
                return found
            more = {"NextToken": answer["NextToken"]}

    async def _make(self, name: str, wanted: dict[str, str]) -> None:
        parameters = {"QueueName": self._prefix + name, "Attributes": wanted}
        try:
            await self._call("create_queue", **parameters)
        except AwsRefused as refused:
            if refused.word not in BLOCKED:
                raise
            await self._clock.sleep(AGAIN)
            await self._call("create_queue", **parameters)

    async def _url(self, name: str) -> str | None:
        try:
            answer = await self._call("get_queue_url", QueueName=self._prefix + name)
        except AwsRefused as refused:
            if refused.word in ABSENT:
                return None
            raise
        return str(answer["QueueUrl"])

    async def _attributes(self, url: str) -> dict[str, str]:
        answer = await self._call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
        found: dict[str, str] = answer["Attributes"]
        return found

    async def _wanted(self, name: str) -> dict[str, str]:
        """The attributes of one of them; the queue of dead letters has to be there before the
        other."""
        if name == DEAD_LETTER_QUEUE:
            return {"MessageRetentionPeriod": str(RETENTION)}
        dead = await self._attributes(await self._url(DEAD_LETTER_QUEUE) or "")
        return attributes(dead_letters=dead["QueueArn"], max_receives=self._max_receives)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("sqs", operation, parameters)


def _different(found: dict[str, str], wanted: dict[str, str]) -> str | None:
    """The first attribute that is another than it should be."""
    for name, value in wanted.items():
        if _read(found.get(name, "")) != _read(value):
            return name
    return None


def _read(value: str) -> Any:
    """A policy is a JSON text, whose numbers SQS may give back as texts."""
    if not value.startswith("{"):
        return value
    return {name: str(part) for name, part in json.loads(value).items()}
