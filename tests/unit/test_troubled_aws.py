"""Random AWS faults: determined by the seed, and of every kind."""

from __future__ import annotations

from contextlib import suppress

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import Answer, Parameters
from conveyor.testing.aws_faults import CALM, AwsTrouble, TroubledAws
from conveyor.testing.chaos_role import ClockAhead
from conveyor.testing.clock import START, FakeClock

SEND: Parameters = {"Entries": [{"Id": "0"}, {"Id": "1"}]}
INSERT: Parameters = {"Statements": [{"Statement": "one"}, {"Statement": "two"}]}


class Counting:
    """An `Aws` to which nothing happens."""

    def __init__(self) -> None:
        self.calls: list[Parameters] = []

    async def call(self, _service: str, _operation: str, parameters: Parameters) -> Answer:
        """Keep the parameters."""
        self.calls.append(parameters)
        return {"Responses": [{} for _ in parameters.get("Statements", ())]}

    def presign(self, operation: str, _parameters: Parameters, *, seconds: int) -> str:
        """A link of a kind."""
        return f"{operation}/{seconds}"


class Instant(FakeClock):
    """A clock on which nobody waits."""

    async def sleep(self, seconds: float) -> None:
        """At once."""


async def troubles(seed: str, *, rate: float = 0.05, calls: int = 400) -> list[AwsTrouble]:
    """Return the faults of `calls` calls, half of them sends and half inserts."""
    told: list[AwsTrouble] = []
    aws = TroubledAws(Counting(), Instant(), seed=seed, rate=rate, on_fault=told.append)
    for _ in range(calls // 2):
        with suppress(ConveyorError):
            await aws.call("sqs", "send_message_batch", SEND)
        with suppress(ConveyorError):
            await aws.call("dynamodb", "batch_execute_statement", INSERT)
    return told


async def test_a_seed_tells_it_all() -> None:
    assert await troubles("one") == await troubles("one") != await troubles("two")
    assert await troubles("one", rate=0.0) == []
    assert await troubles("one", rate=1.0, calls=CALM) == []


async def test_every_kind_happens() -> None:
    told = await troubles("one")
    kinds = {"dropped", "late", "lost", "refused", "split", "throttled", "vanished"}
    assert {trouble.kind for trouble in told} == kinds
    assert {trouble.concerns for trouble in told} == {2}


async def test_messages_are_late_or_never_sent() -> None:
    below, told = Counting(), list[AwsTrouble]()
    aws = TroubledAws(below, Instant(), seed="one", rate=1.0, on_fault=told.append)
    for _ in range(CALM):
        await aws.call("sqs", "send_message_batch", SEND)
    while {trouble.kind for trouble in told} < {"late", "dropped"}:
        below.calls.clear()
        try:
            answer = await aws.call("sqs", "send_message_batch", SEND)
        except ConveyorError:
            continue
        match told[-1].kind:
            case "late":
                assert [entry["DelaySeconds"] for entry in below.calls[0]["Entries"]] == [3, 3]
            case "dropped":
                assert below.calls == []
                assert [one["Id"] for one in answer["Successful"]] == ["0", "1"]


def test_a_clock_ahead_is_so_by_as_much() -> None:
    ahead, behind = ClockAhead(30.0), ClockAhead(-30.0)
    assert 59_000 < ahead.now() - behind.now() < 61_000
    assert behind.new_id() < ahead.new_id()
    assert ahead.now() > START
