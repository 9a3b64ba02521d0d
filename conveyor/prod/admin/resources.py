"""The resources that `conveyor admin` creates, checks and removes: the bucket with its lifecycle
rules, the queues that always exist, and the table."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Collection
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.admin.checks import MADE
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, Parameters
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, table_parameters
from conveyor.prod.s3.bucket import (
    bucket_exists,
    bucket_problem,
    ensure_bucket,
    is_of,
    own,
    owner_of,
    take,
)
from conveyor.prod.sqs.registry import BLOCKED, NO_QUEUE, RETENTION, attributes, prefix

NO_BUCKET = frozenset({"NoSuchBucket", "404"})
NO_UPLOAD = frozenset({"NoSuchUpload", "404"})


async def unless_done(call: Awaitable[Answer], words: Collection[str]) -> None:
    """Make a call, and take a refusal by one of these words as success: an earlier try of it was
    carried out, and its answer lost. Raises AwsRefused for any other."""
    try:
        await call
    except AwsRefused as refused:
        if refused.word not in words:
            raise


class BucketResource:
    """The bucket of one environment."""

    def __init__(self, aws: Aws, name: str, *, region: str, environment: str) -> None:
        self.label = f"bucket {name}"
        self._aws = aws
        self._name = name
        self._region = region
        self._environment = environment

    async def ensure(self) -> str:
        """Create the bucket or its missing lifecycle rules; see `Resource.ensure`. Raises
        ConveyorError(conflict) if the bucket belongs to another environment."""
        was_there = await bucket_exists(self._aws, self._name)
        if was_there:
            await own(self._aws, self._name, self._environment)
        changed = await ensure_bucket(self._aws, self._name, region=self._region)
        if not was_there:
            await own(self._aws, self._name, self._environment)
        if not changed:
            return ""
        return "got its lifecycle rules" if was_there else MADE

    async def problem(self) -> str | None:
        problem = await bucket_problem(self._aws, self._name)
        if problem is not None:
            return problem
        owner = await owner_of(self._aws, self._name)
        return None if owner in (None, self._environment) else is_of(owner)

    async def take(self) -> None:
        """Make the bucket this environment's, whichever it belonged to."""
        if await bucket_exists(self._aws, self._name):
            await take(self._aws, self._name, self._environment)

    async def remove(self) -> bool:
        """Empty and remove the bucket; return False if it did not exist. Raises
        ConveyorError(conflict) if it belongs to another environment."""
        if not await bucket_exists(self._aws, self._name):
            return False
        owner = await owner_of(self._aws, self._name)
        if owner not in (None, self._environment):
            raise ConveyorError(ErrorCode.CONFLICT, f"{self.label} belongs to environment {owner}")
        await self._empty()
        await self._end_uploads()
        await unless_done(self._call("delete_bucket"), NO_BUCKET)
        return True

    async def _empty(self) -> None:
        """Remove all objects, and all their versions: a bucket with one is not removed. Raises
        AwsRefused if S3 keeps all that are left."""
        while True:
            listed = await self._call("list_object_versions")
            found = [*listed.get("Versions", []), *listed.get("DeleteMarkers", [])]
            if not found:
                return
            keys = [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in found]
            answer = await self._call("delete_objects", Delete={"Objects": keys, "Quiet": True})
            kept = answer.get("Errors", [])
            if len(kept) == len(keys):
                word = str(kept[0].get("Code", ""))
                text = f"s3 does not remove {kept[0].get('Key')}"
                raise AwsRefused(word, text, asked=("s3", "delete_objects"))

    async def _end_uploads(self) -> None:
        for upload in (await self._call("list_multipart_uploads")).get("Uploads", []):
            ended = self._call(
                "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
            )
            await unless_done(ended, NO_UPLOAD)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("s3", operation, {"Bucket": self._name, **parameters})


NAME_COOLDOWN = 65.0
"""Seconds after which the name of a deleted queue may be used again."""

_QUEUE_NAME = re.compile(
    rf"{CONTROL_QUEUE}|{DEAD_LETTER_QUEUE}|run-(?:check-)?[0-9A-Za-z]{{26}}(?:-h\d+)?(?:-\d+)?"
)


class QueuesResource:
    """The control and dead-letter queues of one environment; `remove` also takes the queues of
    runs."""

    def __init__(self, aws: Aws, clock: Clock, *, environment: str, max_receives: int) -> None:
        self._prefix = prefix(environment)
        self.label = f"queues {self._prefix}{CONTROL_QUEUE}, {self._prefix}{DEAD_LETTER_QUEUE}"
        self._aws = aws
        self._clock = clock
        self._max_receives = max_receives

    async def ensure(self) -> str:
        """Create the queues, or correct their attributes; see `Resource.ensure`. Waits for the name
        of a queue that was deleted a moment ago."""
        made: list[str] = []
        changes: list[str] = []
        for name in (DEAD_LETTER_QUEUE, CONTROL_QUEUE):
            url, wanted = await self._url(name), await self._wanted(name)
            if url is None:
                await self._make(name, wanted)
                made.append(f"made {self._prefix}{name}")
            elif wrong := _differing_attribute(await self._attributes(url), wanted):
                await self._call("set_queue_attributes", QueueUrl=url, Attributes=wanted)
                changes.append(f"set {wrong} of {self._prefix}{name}")
        return MADE if len(made) == 2 else ", ".join(made + changes)

    async def problem(self) -> str | None:
        for name in (DEAD_LETTER_QUEUE, CONTROL_QUEUE):
            url = await self._url(name)
            if url is None:
                return f"{self._prefix}{name} does not exist (conveyor admin init makes it)"
            wrong = _differing_attribute(await self._attributes(url), await self._wanted(name))
            if wrong:
                return f"{self._prefix}{name} has a wrong {wrong} (conveyor admin init corrects it)"
        return None

    async def remove(self) -> bool:
        """Remove the queues and those of all runs; return False if there were none."""
        removed = False
        while urls := await self._list_queues():
            for url in urls:
                await unless_done(self._call("delete_queue", QueueUrl=url), NO_QUEUE)
            removed = True
            # SQS may list a deleted queue for a while.
            await self._clock.sleep(1.0)
        return removed

    async def _list_queues(self) -> list[str]:
        """Return the URLs of the environment's queues. Filters by full name, because another
        environment's name may begin with this one's."""
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            answer = await self._call(
                "list_queues", QueueNamePrefix=self._prefix, MaxResults=1_000, **more
            )
            for url in answer.get("QueueUrls", []):
                name = url.rpartition("/")[2].removeprefix(self._prefix)
                if _QUEUE_NAME.fullmatch(name):
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
            await self._clock.sleep(NAME_COOLDOWN)
            await self._call("create_queue", **parameters)

    async def _url(self, name: str) -> str | None:
        try:
            answer = await self._call("get_queue_url", QueueName=self._prefix + name)
        except AwsRefused as refused:
            if refused.word in NO_QUEUE:
                return None
            raise
        return str(answer["QueueUrl"])

    async def _attributes(self, url: str) -> dict[str, str]:
        answer = await self._call("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
        found: dict[str, str] = answer["Attributes"]
        return found

    async def _wanted(self, name: str) -> dict[str, str]:
        """Return the attributes that a queue must have. Those of the control queue refer to the
        dead-letter queue, which therefore comes first."""
        if name == DEAD_LETTER_QUEUE:
            return {"MessageRetentionPeriod": str(RETENTION)}
        dead = await self._attributes(await self._url(DEAD_LETTER_QUEUE) or "")
        return attributes(dead_letters=dead["QueueArn"], max_receives=self._max_receives)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("sqs", operation, parameters)


def _differing_attribute(found: dict[str, str], wanted: dict[str, str]) -> str | None:
    """Return the first attribute that differs from the wanted value."""
    for name, value in wanted.items():
        if _read(found.get(name, "")) != _read(value):
            return name
    return None


def _read(value: str) -> Any:
    """Parse a value. A policy is a JSON text, whose numbers SQS may return as texts."""
    if not value.startswith("{"):
        return value
    return {name: str(part) for name, part in json.loads(value).items()}


TABLE_TIMEOUT = 600.0
"""Seconds that a table or an index may take to become active or to disappear."""
POLL = 2.0

NO_TABLE = "ResourceNotFoundException"
TABLE_IN_USE = "ResourceInUseException"


class TableResource:
    """The table of one environment."""

    def __init__(self, aws: Aws, name: str, clock: Clock) -> None:
        self.label = f"table {name}"
        self._aws = aws
        self._name = name
        self._clock = clock

    async def ensure(self) -> str:
        """Create the table, or its missing indexes and time to live; see `Resource.ensure`.

        Raises AwsRefused; ConveyorError if the table does not become usable.
        """
        changes: list[str] = []
        made = ""
        if await self._describe() is None:
            parameters = _without_name(table_parameters(self._name))
            await unless_done(self._call("create_table", **parameters), {TABLE_IN_USE})
            made = MADE
        table = await self._active()
        for index in _missing(table):
            await self._make_index(index)
            changes.append(f"got its index {index['IndexName']}")
        if not await self._expires():
            await self._let_expire()
            changes.append(f"lets items expire by {TIME_TO_LIVE}")
        return made or ", ".join(changes)

    async def _make_index(self, index: dict[str, Any]) -> None:
        """Make an index, and wait for it. A refusal is passed over if it is there then: an earlier
        try, whose answer was lost, made it."""
        refusal: AwsRefused | None = None
        try:
            await self._call(
                "update_table",
                AttributeDefinitions=table_parameters(self._name)["AttributeDefinitions"],
                GlobalSecondaryIndexUpdates=[{"Create": index}],
            )
        except AwsRefused as refused:
            refusal = refused
        table = await self._active()
        if refusal is not None and index in _missing(table):
            raise refusal

    async def _let_expire(self) -> None:
        """Switch the time to live on, where a refusal is passed over likewise."""
        try:
            await self._call(
                "update_time_to_live",
                TimeToLiveSpecification={"Enabled": True, "AttributeName": TIME_TO_LIVE},
            )
        except AwsRefused:
            if not await self._expires():
                raise

    async def problem(self) -> str | None:
        """Compare the table with its description. Raises AwsRefused."""
        table = await self._describe()
        if table is None:
            return "does not exist (conveyor admin init makes it)"
        if table["TableStatus"] not in ("ACTIVE", "UPDATING"):
            return f"is {table['TableStatus'].lower()}"
        wanted = table_parameters(self._name)
        if _keys(table) != _keys(wanted):
            return "has the wrong keys"
        if missing := _missing(table):
            names = ", ".join(index["IndexName"] for index in missing)
            return f"lacks the index {names} (conveyor admin init makes it)"
        for index in table["GlobalSecondaryIndexes"]:
            if index.get("IndexStatus", "ACTIVE") != "ACTIVE":
                return f"its index {index['IndexName']} is {index['IndexStatus'].lower()}"
        if wrong := _differing_key(table, wanted):
            return f"has a wrong index {wrong}"
        if not await self._expires():
            return f"items do not expire by {TIME_TO_LIVE} (conveyor admin init turns it on)"
        return None

    async def is_protected(self) -> bool:
        """Return whether the table refuses to be removed. Raises AwsRefused."""
        table = await self._describe()
        return table is not None and table.get("DeletionProtectionEnabled", False)

    async def remove(self) -> bool:
        """Remove the table; return False if it did not exist. Raises AwsRefused."""
        table = await self._describe()
        if table is None:
            return False
        try:
            await unless_done(self._call("delete_table"), {NO_TABLE})
        except AwsRefused:
            left = await self._describe()
            if left is not None and left["TableStatus"] != "DELETING":
                raise
        deadline = self._clock.monotonic() + TABLE_TIMEOUT
        while await self._describe() is not None:
            await self._wait(deadline)
        return True

    async def _active(self) -> dict[str, Any]:
        deadline = self._clock.monotonic() + TABLE_TIMEOUT
        while True:
            table = await self._describe()
            if table is not None and _is_usable(table):
                return table
            await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        if self._clock.monotonic() > deadline:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"{self.label} is not ready after {TABLE_TIMEOUT:g} s"
            )
        await self._clock.sleep(POLL)

    async def _describe(self) -> dict[str, Any] | None:
        try:
            answer = await self._call("describe_table")
        except AwsRefused as refused:
            if refused.word != NO_TABLE:
                raise
            return None
        table: dict[str, Any] = answer["Table"]
        return table

    async def _expires(self) -> bool:
        answer = await self._call("describe_time_to_live")
        stated = answer["TimeToLiveDescription"]
        return (
            stated.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
            and stated.get("AttributeName") == TIME_TO_LIVE
        )

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("dynamodb", operation, {"TableName": self._name, **parameters})


def _without_name(parameters: Parameters) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "TableName"}


def _is_usable(table: dict[str, Any]) -> bool:
    return table["TableStatus"] == "ACTIVE" and all(
        index.get("IndexStatus", "ACTIVE") == "ACTIVE"
        for index in table.get("GlobalSecondaryIndexes", [])
    )


def _keys(table: Parameters) -> set[tuple[str, str]]:
    return {(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]}


def _missing(table: dict[str, Any]) -> list[dict[str, Any]]:
    there = {index["IndexName"] for index in table.get("GlobalSecondaryIndexes", [])}
    wanted: list[dict[str, Any]] = table_parameters(table["TableName"])["GlobalSecondaryIndexes"]
    return [index for index in wanted if index["IndexName"] not in there]


def _differing_key(table: dict[str, Any], wanted: Parameters) -> str | None:
    there = {index["IndexName"]: index for index in table["GlobalSecondaryIndexes"]}
    for index in wanted["GlobalSecondaryIndexes"]:
        found = there[index["IndexName"]]
        if _keys(found) != _keys(index) or _projected(found) < _projected(index):
            name: str = index["IndexName"]
            return name
    return None


def _projected(index: dict[str, Any]) -> frozenset[str]:
    return frozenset(index["Projection"].get("NonKeyAttributes", ()))
