"""A final refusal of DynamoDB is reported as one, at once, and not taken for a lost race."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from conveyor.domain.deliveries import dropped
from conveyor.domain.model import Callback, RunFailure
from conveyor.domain.webhooks import Webhook
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.inputs import InputType, JobInput
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.copying import Intent, abandon_intent
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoGenerations
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import DAY, DB, INSERT, LAPSE, TRANSACT, Bench, open_bench
from tests.conformance.dynamo_schedules import fire, scheduled
from tests.conformance.sent_deliveries import new_delivery, owe
from tests.conformance.world import CALLER

pytestmark = pytest.mark.extended

SINGLE = ("put_item", "update_item", "delete_item", TRANSACT)
Step = Callable[[], Awaitable[object]]
Steps = Callable[[Bench, str, str], Awaitable[Step]]


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with two processes on it."""
    async with open_bench(clock) as opened:
        yield opened


def refuse_writes(bench: Bench) -> None:
    """From now on every write is one that the table will never take."""
    for operation in (*SINGLE, INSERT):
        refusal = AwsRefused("ValidationException", "no such thing", asked=(DB, operation))
        bench.faults.fail(DB, operation, refusal, times=1_000)


def simply(step: Callable[[Bench, str, str], Awaitable[object]]) -> Steps:
    """A step that nothing has to come before."""

    async def prepared(bench: Bench, job_id: str, run_id: str) -> Step:
        return lambda: step(bench, job_id, run_id)

    return prepared


async def renewal(bench: Bench, job_id: str, run_id: str) -> Step:
    task = await bench.other.claimed(run_id, 0)
    held = [(run_id, task.task_id, task.claim_number)]
    until = bench.world.now + DAY
    return lambda: bench.store.tasks.renew_claims(held, claimed_until=until)


async def settlement(bench: Bench, job_id: str, run_id: str) -> Step:
    task = await bench.other.claimed(run_id, 0)
    return lambda: bench.world.settle(task, bench.world.success(task))


async def takeover(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.other.claimed(run_id, 0)
    await bench.world.clock.advance(DAY / 1_000)
    return lambda: bench.world.claim(run_id, 0)


async def rerun(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.other.store.runs.stop_run(CALLER, job_id, now=bench.world.now)
    return lambda: bench.world.rerun(job_id)


async def expiry(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.other.store.runs.stop_run(CALLER, job_id, now=bench.world.now)
    return lambda: bench.store.sweeping.expire_run(run_id, now=bench.world.now)


async def correction(bench: Bench, job_id: str, run_id: str) -> Step:
    place = await RunPlaces(bench.table).find(run_id)
    assert place is not None
    await bench.table.update(place.key, "SET credits = :n", condition="attribute_exists(pk)", n=7)
    return lambda: bench.store.sweeping.reconcile_run(run_id, now=bench.world.now)


async def taking_back(bench: Bench, job_id: str, run_id: str) -> Step:
    """Rows whose intent another call has ended meanwhile; the run itself was not made."""
    place = await RunPlaces(bench.table).find(run_id)
    assert place is not None
    # Its own intent is looked for first: that condition is not met, and only then comes the put.
    return lambda: abandon_intent(bench.store.table, Intent(place, "holder", is_first=False))


def an_export(bench: Bench, job_id: str, run_id: str) -> Export:
    return Export(
        export_id=run_id,
        job_id=job_id,
        run_id=run_id,
        format=ExportFormat.JSONL,
        status=ExportStatus.PENDING,
        created_at=bench.world.now,
        updated_at=bench.world.now,
        expires_at=bench.world.now + DAY,
    )


async def beginning_export(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.other.store.exports.create_export(an_export(bench, job_id, run_id))
    return lambda: bench.store.exports.begin_export(run_id, now=bench.world.now)


def an_input(bench: Bench) -> JobInput:
    now = bench.world.now
    return JobInput(
        input_id="input",
        caller=CALLER,
        type=InputType.JSONL,
        content_type="text/plain",
        created_at=now,
        upload_until=now + LAPSE,
        expires_at=now + DAY,
    )


async def upload(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.other.store.inputs.create_input(an_input(bench))
    return lambda: bench.store.inputs.input_uploaded("input", size=1)


async def release(bench: Bench, job_id: str, run_id: str) -> Step:
    await bench.key("scope")
    return lambda: bench.release("scope")


def entry_key(run_id: str) -> EntryKey:
    return EntryKey(run_id, Subscriber.CALLBACK)


async def giving_back_lease(bench: Bench, job_id: str, run_id: str) -> Step:
    outbox, now = bench.store.outbox, bench.world.now
    entry = await outbox.lease_entry(entry_key(run_id), now=now, lapses_at=now + LAPSE)
    assert entry is not None
    return lambda: outbox.reschedule_entry(entry, due_at=now, attempts=0)


async def dropping_entry(bench: Bench, job_id: str, run_id: str) -> Step:
    outbox, now = bench.store.outbox, bench.world.now
    entry = await outbox.lease_entry(entry_key(run_id), now=now, lapses_at=now + LAPSE)
    assert entry is not None
    return lambda: outbox.drop_entry(entry)


async def changing_delivery(bench: Bench, job_id: str, run_id: str) -> Step:
    delivery = await owe(bench.other)
    after = dropped(delivery, now=bench.world.now)
    return lambda: bench.store.deliveries.change_delivery(delivery, after)


async def dropping_deliveries(bench: Bench, job_id: str, run_id: str) -> Step:
    delivery, now = await owe(bench.other), bench.world.now
    after = dropped(delivery, now=now)
    assert await bench.other.store.deliveries.change_delivery(delivery, after)
    return lambda: bench.store.deliveries.drop_old_deliveries(before=now + 1, limit=1)


async def firing(bench: Bench, job_id: str, run_id: str) -> Step:
    change = fire(bench.world, await scheduled(bench.other))
    return lambda: bench.store.schedules.change_schedule(change)


async def purge(bench: Bench, job_id: str, run_id: str) -> Step:
    job = await scheduled(bench.other)
    await bench.other.store.jobs.delete_job(CALLER, job.job_id, now=bench.world.now)
    return lambda: bench.store.jobs.purge_job(job.job_id)


def generations(bench: Bench) -> DynamoGenerations:
    return DynamoGenerations(DynamoRunRows(bench.store.table, RunPlaces(bench.store.table)))


STEPS: dict[str, Steps] = {
    "submit": simply(lambda bench, job_id, run_id: bench.world.submit(2)),
    "submit a schedule": simply(lambda bench, job_id, run_id: scheduled(bench.world)),
    "fire": firing,
    "purge a job": purge,
    "append": simply(lambda bench, job_id, run_id: bench.world.append(job_id, 1)),
    "close": simply(
        lambda bench, job_id, run_id: bench.store.jobs.close_job(
            CALLER, job_id, now=bench.world.now
        )
    ),
    "stop": simply(
        lambda bench, job_id, run_id: bench.store.runs.stop_run(CALLER, job_id, now=bench.world.now)
    ),
    "pause": simply(
        lambda bench, job_id, run_id: bench.store.runs.pause_run(
            CALLER, job_id, paused=True, now=bench.world.now
        )
    ),
    "fail": simply(
        lambda bench, job_id, run_id: bench.store.runs.fail_run(
            run_id, reason=RunFailure.INGEST_FAILED, detail="", now=bench.world.now
        )
    ),
    "rerun": rerun,
    "taking back": taking_back,
    "delete a run": simply(
        lambda bench, job_id, run_id: bench.store.runs.delete_run(
            CALLER, job_id, run_id, now=bench.world.now
        )
    ),
    "delete a job": simply(
        lambda bench, job_id, run_id: bench.store.jobs.delete_job(
            CALLER, job_id, now=bench.world.now
        )
    ),
    "expire": expiry,
    "correct": correction,
    "sweep": simply(
        lambda bench, job_id, run_id: bench.store.sweeping.claim_sweep(
            now=bench.world.now, lapses_at=bench.world.now + LAPSE
        )
    ),
    "mark swept": simply(lambda bench, job_id, run_id: bench.store.sweeping.mark_swept(run_id)),
    "claim": simply(lambda bench, job_id, run_id: bench.world.claim(run_id, 0)),
    "take over": takeover,
    "renew": renewal,
    "settle": settlement,
    "claim a key": simply(lambda bench, job_id, run_id: bench.key("scope")),
    "release a key": release,
    "make an export": simply(
        lambda bench, job_id, run_id: bench.store.exports.create_export(
            an_export(bench, job_id, run_id)
        )
    ),
    "begin an export": beginning_export,
    "make an input": simply(
        lambda bench, job_id, run_id: bench.store.inputs.create_input(an_input(bench))
    ),
    "upload": upload,
    "lease a notice": simply(
        lambda bench, job_id, run_id: bench.store.outbox.lease_entry(
            entry_key(run_id), now=bench.world.now, lapses_at=bench.world.now + LAPSE
        )
    ),
    "put off a notice": giving_back_lease,
    "drop a notice": dropping_entry,
    "set a webhook": simply(
        lambda bench, job_id, run_id: bench.store.jobs.set_webhook(
            CALLER, job_id, Webhook("https://hooks.example.com"), now=bench.world.now
        )
    ),
    "make a delivery": simply(
        lambda bench, job_id, run_id: bench.store.deliveries.create_delivery(
            new_delivery(bench.world)
        )
    ),
    "change a delivery": changing_delivery,
    "drop old deliveries": dropping_deliveries,
    "follow a queue": simply(lambda bench, job_id, run_id: generations(bench).follow(run_id, 0)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
async def test_a_write_that_is_never_taken_is_told_as_that(bench: Bench, step: Steps) -> None:
    job_id, run_id = await bench.other.submit(2, closed=False, callback=Callback("token"))
    act = await step(bench, job_id, run_id)
    before = len(bench.faults.calls)
    if step is taking_back:
        refusal = AwsRefused("ValidationException", "no such thing", asked=(DB, "put_item"))
        bench.faults.fail(DB, "put_item", refusal, times=1_000)
    else:
        refuse_writes(bench)
    with pytest.raises(AwsRefused) as refused:
        await act()
    assert refused.value.word == "ValidationException"
    writes = [call for call in bench.faults.calls[before:] if call[1] in (*SINGLE, INSERT)]
    # One, or one that another has to come after: what is tried anew is tried twenty times.
    assert 1 <= len(writes) <= 3
