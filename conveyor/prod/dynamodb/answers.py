"""The answer of an idempotent request, stored by the very transaction that does its work."""

from __future__ import annotations

from typing import Any

from conveyor.ports.records import Answer, Once
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import idempotency_key


class Answers:
    """Answers under idempotency keys."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def look(self, once: Once | None) -> Answer | Once | None:
        """What stands under a key, strongly read: its answer, if its work is done already; else the
        key itself, for `parts`; None where no key was given, or there is none (any more)."""
        if once is None:
            return None
        item = await self._table.get(idempotency_key(once.scope))
        if item is None:
            return None
        return once if (answer := read_answer(item)) is None else answer

    def parts(self, once: Once | None, answer: Answer) -> list[dict[str, Any]]:
        """What a transaction has to hold so that the answer stands under its key, or nothing of it
        happens: that is refused where the key is gone or answered. Look again then."""
        if once is None:
            return []
        return [
            self._table.update_part(
                idempotency_key(once.scope),
                "SET answer_status = :status, answer_body = :body",
                condition="attribute_exists(pk) AND attribute_not_exists(answer_status)",
                status=answer.status,
                body=answer.body,
            )
        ]


def read_answer(item: Item) -> Answer | None:
    """The answer that a key's item holds."""
    status = item.get("answer_status")
    return None if status is None else Answer(status, item["answer_body"])
