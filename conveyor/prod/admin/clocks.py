"""How far this machine's clock is from that of a service, by the Date of an answer."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Table
from conveyor.prod.dynamodb.keys import FLEET
from conveyor.prod.dynamodb.values import tag_all

FURTHEST = 30.0
"""Seconds. Signatures are refused from five minutes on; delays, claims and links suffer before."""


async def clock_problem(table: Table, clock: Clock) -> str | None:
    """What is wrong with the clock of this machine. Raises AwsRefused."""
    before = clock.now()
    try:
        answer = await table.call("get_item", Key=tag_all(FLEET._asdict()))
    except AwsRefused as refused:
        if refused.word != "ResourceNotFoundException":
            raise
        return "cannot be compared while there is no table"
    passed = clock.now() - before
    stated = _date(answer)
    if stated is None:
        return "cannot be compared: the answer of DynamoDB carries no date"
    # A Date is cut to whole seconds: the middle of its second against the middle of the call.
    apart = (before + passed / 2 - (stated + 500)) / 1_000
    if abs(apart) <= FURTHEST:
        return None
    return f"is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of DynamoDB"


def _date(answer: dict[str, Any]) -> float | None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return parsedate_to_datetime(headers["date"]).timestamp() * 1_000
    except (KeyError, ValueError, TypeError):
        return None
