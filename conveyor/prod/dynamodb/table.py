"""The one table: its keys, its indexes, its time to live. `conveyor admin init` makes it from this
description, and the deployment template is held against it."""

from __future__ import annotations

from typing import Any

from conveyor.prod.aws.calls import Parameters

PARTITION_KEY = "pk"
SORT_KEY = "sk"
TIME_TO_LIVE = "ttl"
"""Whole seconds since the epoch, after which DynamoDB removes an item by itself, some time."""
BY_OWNER = "gsi1"
"""Jobs of a caller; runs by what is due for them."""
BY_DISPATCH = "gsi2"
"""Runs by when their dispatch changed. Its name tells of them alone: whatever else is looked for by
time lies in partitions of its own here too, file inputs and exports by when they end, notices of
the outbox by when they are due."""

INDEXES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    BY_OWNER: ("gsi1pk", "gsi1sk", ("status", "job_id", "run_id")),
    BY_DISPATCH: (
        "gsi2pk",
        "gsi2sk",
        ("status", "paused", "job_id", "run_id", "priority", "max_inflight", "created_at"),
    ),
}
"""Each index: partition key, sort key, and the attributes carried over. Nothing that a counter's
flush writes is among them, so that counting touches no index."""

ROW_SHAPE = 1
"""The version of the items' shape, in the attribute `shape` of each."""


def description(table: str) -> Parameters:
    """What CreateTable is asked for: billed by request, keys and indexes as above."""
    keys = [PARTITION_KEY, SORT_KEY]
    indexes: list[dict[str, Any]] = []
    for name, (partition, sort, attributes) in INDEXES.items():
        keys += [partition, sort]
        indexes.append(
            {
                "IndexName": name,
                "KeySchema": _schema(partition, sort),
                "Projection": {
                    "ProjectionType": "INCLUDE",
                    "NonKeyAttributes": list(attributes),
                },
            }
        )
    return {
        "TableName": table,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"} for key in keys],
        "KeySchema": _schema(PARTITION_KEY, SORT_KEY),
        "GlobalSecondaryIndexes": indexes,
    }


def _schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]
