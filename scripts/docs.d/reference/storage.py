"""The page about stored data: SQLite, DynamoDB, queues, the bucket, Redis."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import anyio

from conveyor.dev.directory import CONTENTS
from conveyor.dev.sqlite.database import open_reader, open_writer
from conveyor.dev.sqlite.schema import STEPS, migrate
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.dynamodb.schema import INDEXES, SPREAD
from conveyor.prod.redis.job_cache import KEPT
from conveyor.prod.redis.permits import ledger_key
from conveyor.prod.s3.bucket import lifecycle_rules
from conveyor.prod.sqs.registry import RETENTION, prefix, run_queue_name
from reference.dynamodb_attributes import FOUND_BY, ITEMS, OF_EVERY_ITEM
from reference.markdown import code, page, table
from reference.sqlite_columns import PRAGMAS, READER, WRITER, read_meanings


def columns() -> str:
    """Return tables of all stored data, under their names."""
    return page(
        "Data in development",
        "Times are milliseconds since 1970, unless a row says otherwise.",
        "## The data directory",
        "Of mode 0700, with files of mode 0600.",
        table(["Path", "Holds"], _rows(CONTENTS)),
        "## SQLite",
        *_sqlite(),
    )


def items() -> str:
    """Return what lies in production: items, queues, lifecycle rules and keys."""
    return page(
        "Data in production",
        "Times are milliseconds since 1970, unless a row says otherwise.",
        "## DynamoDB",
        *_dynamodb(),
        "## Queues of SQS",
        _queues(),
        "## Lifecycle rules of the bucket",
        "S3 removes objects that the sweeper missed.",
        _lifecycle(),
        "## Keys of Redis",
        _redis(),
    )


def _sqlite() -> list[str]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    blocks = []
    for name, (holds, meanings) in read_meanings(chain.from_iterable(STEPS)).items():
        found = connection.execute(f"PRAGMA table_info({name})").fetchall()
        rows = [
            [
                code(column),
                f"{kind}{', not null' if needed or key else ''}{', key' if key else ''}",
                meanings[column],
            ]
            for _, column, kind, needed, _, key in found
        ]
        blocks += [
            f"### {code(name)}",
            f"{holds[0].upper()}{holds[1:]}.",
            table(["Column", "Type", "Holds"], rows),
        ]
    indexes = connection.execute(
        "SELECT name, tbl_name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    ).fetchall()
    rows = [
        [code(index), code(on), code(*(row[2] for row in _info(connection, index)))]
        for index, on in sorted(indexes)
    ]
    connection.close()
    return [
        *blocks,
        "### Indexes",
        table(["Index", "Table", "Columns"], rows),
        "### Pragmas",
        table(["Pragma", "Connection", "Value", "Why"], anyio.run(_pragmas)),
    ]


def _info(connection: sqlite3.Connection, index: str) -> list[Any]:
    return connection.execute(f"PRAGMA index_info({index})").fetchall()


async def _pragmas() -> list[list[str]]:
    def read(pragma: str) -> Callable[[sqlite3.Connection], str]:
        return lambda connection: code(connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "conveyor.db"
        writer = await open_writer(path, migrate)
        reader = await open_reader(path)
        try:
            connections = {WRITER: writer, READER: reader}
            return [
                [code(name), where, await connections[where].run(read(name)), why]
                for name, where, why in PRAGMAS
            ]
        finally:
            await reader.close()
            await writer.close()


def _dynamodb() -> list[str]:
    blocks = [
        table(["Attribute of any item", "Holds"], _rows(OF_EVERY_ITEM)),
        "### Items",
        table(
            ["Item", "Partition key", "Sort key", "Holds"],
            [[name, code(one.key.pk), code(one.key.sk), one.holds] for name, one in ITEMS.items()],
        ),
    ]
    for name, one in ITEMS.items():
        if one.attributes:
            blocks += [
                f"### Attributes: {name}",
                table(["Attribute", "Holds"], _rows(one.attributes)),
            ]
    blocks += [
        "### Indexes of the table",
        table(
            ["Index", "Keys", "Carries"],
            [
                [code(name), code(partition, sort), code(*carried)]
                for name, (partition, sort, carried) in INDEXES.items()
            ],
        ),
        f"N is the CRC-32 of the id of the run, or scheduled job, modulo {SPREAD}. An index lags "
        "behind the table.",
        table(
            ["Index", "Partition", "Finds"],
            [
                [code(index), code(partition), finds]
                for index, partitions in FOUND_BY.items()
                for partition, finds in partitions.items()
            ],
        ),
    ]
    return blocks


def _rows(texts: dict[str, str]) -> list[list[str]]:
    return [[code(name), text] for name, text in texts.items()]


def _queues() -> str:
    days = f"{RETENTION // 86_400} days"
    own = prefix("ENVIRONMENT")
    run = run_queue_name("ENVIRONMENT", "RUN", 1).removesuffix("1") + "GENERATION"
    of_host = run_queue_name("ENVIRONMENT", "RUN", 1, 0).removesuffix("0-1") + "HOST-GENERATION"
    lives = "from the first references of a run to its end; a lost worker's is removed within hours"
    too_often = "goes to the dead letters"
    return table(
        ["Queue", "Is there", "Retention", "A message received too often"],
        [
            [code(own + CONTROL_QUEUE), "always", days, too_often],
            [code(own + DEAD_LETTER_QUEUE), "always", f"{days} after it was first sent", "stays"],
            [code(run), lives, days, too_often],
            [code(of_host), "as that of its run", days, too_often],
        ],
    )


def _lifecycle() -> str:
    rows = []
    for rule in lifecycle_rules():
        below = rule["Filter"]["Prefix"]
        if "NoncurrentVersionExpiration" in rule:
            days = rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
            after = f"{days}, versions of what was deleted or replaced"
        elif "Expiration" in rule:
            after = str(rule["Expiration"]["Days"])
        else:
            days = rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
            after = f"{days}, parts of unfinished uploads"
        rows.append([code(rule["ID"]), code(below) if below else "everything", after])
    return table(["Lifecycle rule", "Prefix", "After days"], rows)


def _redis() -> str:
    ledger = "the permits of the fleet: a field a job (holder, count, sequence, want, end of lease)"
    return table(
        ["Key", "Holds", "Kept"],
        [
            [
                code(ledger_key("ENVIRONMENT")),
                f"{ledger}, and {code('#server', '#since', '#seen', '#lease')}",
                "for ever",
            ],
            [
                code("conveyor:ENVIRONMENT:rate:CALLER"),
                f"the bucket of a caller: {code('tokens', 'at')}",
                "until it is full again",
            ],
            [
                code("conveyor:ENVIRONMENT:job:FIELDS:JOB"),
                "a job for workers, its key encrypted; FIELDS is a checksum of the names of a "
                "job's fields",
                f"{KEPT} s",
            ],
        ],
    )
