"""Questions that a development server and a fleet answer in different ways, for tests of both."""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urljoin

import boto3
import msgspec

from conveyor.prod.dynamodb.schema import task_sort_key
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_boot import Booted
from tests.acceptance.support_data import rows_of
from tests.acceptance.support_wire import holds_no_permit
from tests.conformance.emulators import REGION, address
from tests.disk import body_files
from tests.patient import fetched

DEVELOPMENT, FLEET = "development", "fleet"
BINDINGS = (DEVELOPMENT, FLEET)

_TASK_KIND = task_sort_key("", "").partition("#")[0]


class Serving(Protocol):
    """The server of the API: a development server or a fleet."""

    @property
    def api(self) -> str:
        """The API's address; it ends in /v1."""


class Hits(msgspec.Struct, frozen=True):
    """The calls that have reached a gateway; `peak_in_flight` is how many there were at a time."""

    total: int
    counts: dict[str, int]
    in_flight: int
    peak_in_flight: int


def hits(fleet: RoleFleet) -> Hits:
    """Return the counts of calls from a fleet's gateway."""
    told = fetched(urljoin(fleet.environment["CONVEYOR_GATEWAY"], "/hits"))
    return msgspec.json.decode(told.content, type=Hits)


def metrics(fleet: RoleFleet, role: str) -> list[str]:
    """The metrics of each of its processes of one role."""
    return [
        fetched(f"{process.info.metrics}/metrics").text
        for process in fleet.processes
        if process.role == role and process.alive
    ]


def holds_no_permits(fleet: RoleFleet) -> bool:
    """Return whether no worker of a fleet has a permit in hand."""
    return all(holds_no_permit(page) for page in metrics(fleet, "worker"))


def bodies(server: Serving, part: str) -> list[str]:
    """The keys of the bodies that are stored, of those in whose key this stands."""
    if isinstance(server, RoleFleet):
        bucket = server.environment["CONVEYOR_BUCKET"]
        pages = _client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket)
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    else:
        assert isinstance(server, Booted)
        root = server.data_dir / "blobs"
        keys = [str(path.relative_to(root)) for path in body_files(server.data_dir)]
    return [key for key in keys if part in key]


def rows_written(server: Serving, run_id: str) -> int:
    """Count a run's rows in the database itself."""
    if not isinstance(server, RoleFleet):
        assert isinstance(server, Booted)
        sql = (
            "SELECT count(*) FROM tasks JOIN runs ON task_key >> 35 >= run_no "
            "AND task_key >> 35 < run_no + shard_count WHERE run_id = ?"
        )
        found: int = rows_of(server.data_dir, sql, run_id)[0][0]
        return found
    pages = _client("dynamodb").get_paginator("scan")
    # Not by way of the run's place, which is gone with a run that was deleted.
    return sum(
        page["Count"]
        for page in pages.paginate(
            TableName=f"conveyor-{server.name}",
            Select="COUNT",
            ConsistentRead=True,
            FilterExpression="begins_with(sk, :run)",
            ExpressionAttributeValues={":run": {"S": task_sort_key(run_id, "")}},
        )
    )


def items_kept(fleet: RoleFleet) -> dict[str, set[str]]:
    """The jobs, runs and tasks that the table of a fleet holds, by their keys."""
    pages = (
        _client("dynamodb")
        .get_paginator("scan")
        .paginate(
            TableName=f"conveyor-{fleet.name}", ProjectionExpression="pk, sk", ConsistentRead=True
        )
    )
    kept: dict[str, set[str]] = {"Job": set(), "Run": set(), _TASK_KIND: set()}
    for item in (item for page in pages for item in page["Items"]):
        key = item["sk"]["S"]
        kept.get(key.partition("#")[0], set()).add(f"{item['pk']['S']} {key}")
    return {"jobs": kept["Job"], "runs": kept["Run"], "tasks": kept[_TASK_KIND]}


def _client(service: str) -> Any:
    variable = f"CONVEYOR_TEST_{service.upper()}"
    return boto3.client(service, region_name=REGION, endpoint_url=address(variable) or None)
