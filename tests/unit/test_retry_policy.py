"""The meaning of a failed scrape for its task."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain.model import (
    Event,
    EventKind,
    Job,
    JobStatus,
    Problem,
    Spend,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
    WaitReason,
)
from conveyor.domain.task_rules import Deferred, Failed, Retry
from conveyor.handlers.retry_policy import RECORDED, RetryPolicy, attempt_event
from conveyor.ports.gateway import Postponed, ScrapeFailed
from conveyor.testing.clock import FakeClock

PROBLEM = Problem(code="gateway_unreachable", title="Gateway unreachable", status=502)


def make_job(max_attempts: int = 3) -> Job:
    return Job(
        job_id="01J00000000000000000000000",
        caller="c",
        status=JobStatus.CLOSED,
        created_at=0,
        updated_at=0,
        max_attempts=max_attempts,
    )


def make_task(
    clock: FakeClock, *, attempts: int = 0, waiting_since: int = 0, not_before: int = 0
) -> Task:
    return Task(
        run_id="01J00000000000000000000001",
        task_id="0000000AAAAAAAAAAAAAAAAAAA",
        index=0,
        spec=TaskSpec("http://a.test/"),
        status=TaskStatus.PROCESSING,
        created_at=clock.now(),
        updated_at=clock.now(),
        attempts=attempts,
        waiting_since=waiting_since,
        not_before=not_before,
    )


def judge(
    clock: FakeClock, failure: ScrapeFailed, *, attempts: int = 0, receives: int = 1
) -> Failed | Retry | Deferred:
    task = make_task(clock, attempts=attempts)
    event = attempt_event(task, failure, started_at=clock.now(), ended_at=clock.now())
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
    return rules.decide(failure, task, make_job(), event=event, receives=receives)


@pytest.mark.parametrize(("attempts", "low", "high"), [(0, 500, 1500), (1, 1000, 3000)])
def test_a_retry_backs_off_exponentially_with_jitter(attempts: int, low: int, high: int) -> None:
    clock = FakeClock()
    failure = ScrapeFailed(PROBLEM, TaskFailure.GATEWAY_ERROR, retryable=True)
    for _ in range(50):
        verdict = judge(clock, failure, attempts=attempts)
        assert isinstance(verdict, Retry)
        assert low <= verdict.not_before - clock.now() <= high


def test_the_last_attempt_fails_the_task_with_its_own_problem() -> None:
    clock = FakeClock()
    failure = ScrapeFailed(PROBLEM, TaskFailure.GATEWAY_ERROR, retryable=True)
    verdict = judge(clock, failure, attempts=2)
    assert isinstance(verdict, Failed)
    assert verdict.problem is PROBLEM
    assert verdict.failure is TaskFailure.GATEWAY_ERROR
    assert verdict.event.attempt == 3


def test_retry_after_wins_over_a_shorter_backoff() -> None:
    clock = FakeClock()
    failure = ScrapeFailed(PROBLEM, TaskFailure.TIMEOUT, retryable=True, retry_after=30.0)
    verdict = judge(clock, failure)
    assert isinstance(verdict, Retry)
    assert verdict.not_before - clock.now() == 30_000


def test_what_cannot_be_retried_fails_at_once() -> None:
    clock = FakeClock()
    verdict = judge(clock, ScrapeFailed(PROBLEM, TaskFailure.BAD_TARGET))
    assert isinstance(verdict, Failed)


async def test_a_throttled_call_burns_no_attempt_until_its_deadline() -> None:
    clock = FakeClock()
    failure = ScrapeFailed(PROBLEM, TaskFailure.OTHER, retryable=True, burns_attempt=False)
    task = make_task(clock, attempts=2)
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)

    def verdict() -> Failed | Retry | Deferred:
        event = Event(
            kind=EventKind.ATTEMPT, attempt=3, started_at=clock.now(), ended_at=clock.now()
        )
        return rules.decide(failure, task, make_job(), event=event, receives=9)

    await clock.advance(90)  # a task that is old has waited for nothing yet
    early = verdict()
    assert isinstance(early, Retry)
    assert not early.burns_attempt
    assert early.recorded
    assert early.since == clock.now()
    await clock.advance(59)
    task = msgspec.structs.replace(task, waiting_since=early.since, not_before=clock.now())
    again = verdict()
    assert isinstance(again, Retry)
    assert again.since == early.since
    await clock.advance(1)
    late = verdict()
    assert isinstance(late, Failed)
    assert late.failure is TaskFailure.RATE_LIMITED


@pytest.mark.parametrize(
    ("receives", "spend", "burns", "recorded"),
    [
        (RECORDED, Spend(), False, True),
        (RECORDED + 1, Spend(), False, False),
        (RECORDED + 1, Spend(1, 0.5), False, True),
        (RECORDED + 1, Spend(), True, True),
    ],
)
def test_of_refusals_for_load_the_first_are_written_down_and_all_that_cost_something(
    receives: int, spend: Spend, burns: bool, recorded: bool
) -> None:
    clock = FakeClock()
    failure = ScrapeFailed(
        PROBLEM, TaskFailure.OTHER, retryable=True, burns_attempt=burns, spend=spend
    )
    now = clock.now()
    event = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=now, ended_at=now, spend=spend)
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
    verdict = rules.decide(failure, make_task(clock), make_job(), event=event, receives=receives)
    assert isinstance(verdict, Retry)
    assert verdict.recorded is recorded


@pytest.mark.parametrize(
    ("retry_after", "burns_attempt", "waiting"),
    [
        (0.0, True, WaitReason.BACKOFF),
        (0.1, True, WaitReason.BACKOFF),
        (30.0, True, WaitReason.RETRY_AFTER),
        (0.0, False, WaitReason.LOAD_REFUSAL),
        (30.0, False, WaitReason.LOAD_REFUSAL),
    ],
)
def test_a_retry_says_why_it_waits(
    retry_after: float, burns_attempt: bool, waiting: WaitReason
) -> None:
    failure = ScrapeFailed(
        PROBLEM,
        TaskFailure.TIMEOUT,
        retryable=True,
        retry_after=retry_after,
        burns_attempt=burns_attempt,
    )
    verdict = judge(FakeClock(), failure)
    assert isinstance(verdict, Retry)
    assert verdict.waiting is waiting


@pytest.mark.parametrize("waiting", [WaitReason.HOST_RETRY_AFTER, WaitReason.OUTAGE])
async def test_a_postponed_call_is_put_off_until_the_deadline(waiting: WaitReason) -> None:
    clock = FakeClock()
    failure = Postponed(PROBLEM, TaskFailure.OTHER, retry_after=0.0101, waiting=waiting)
    task = make_task(clock, attempts=2)
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)

    def verdict(receives: int = 99) -> Failed | Retry | Deferred:
        now = clock.now()
        event = attempt_event(task, failure, started_at=now, ended_at=now)
        return rules.decide(failure, task, make_job(), event=event, receives=receives)

    await clock.advance(90)
    since = clock.now()
    assert verdict() == Deferred(since + 11, waiting, since)
    await clock.advance(59)
    task = msgspec.structs.replace(task, waiting_since=since, not_before=clock.now())
    assert verdict() == Deferred(clock.now() + 11, waiting, since)
    failure.sent = 1
    for receives in (RECORDED, RECORDED + 1):
        led = verdict(receives)
        assert isinstance(led, Retry)
        assert (led.not_before, led.waiting) == (clock.now() + 11, waiting)
        assert (led.burns_attempt, led.recorded) == (False, receives <= RECORDED)
        assert led.since == since
    await clock.advance(1)
    late = verdict()
    assert isinstance(late, Failed)
    assert (late.problem, late.failure) == (PROBLEM, TaskFailure.OTHER)


async def test_an_attempt_that_was_answered_ends_the_wait() -> None:
    clock = FakeClock()
    task = make_task(clock, waiting_since=clock.now())
    await clock.advance(90)
    failure = ScrapeFailed(PROBLEM, TaskFailure.TIMEOUT, retryable=True)
    event = attempt_event(task, failure, started_at=clock.now(), ended_at=clock.now())
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
    verdict = rules.decide(failure, task, make_job(), event=event, receives=2)
    assert isinstance(verdict, Retry)
    assert verdict.since == 0


async def test_an_outage_counts_from_its_begin_and_not_from_before_its_task() -> None:
    clock = FakeClock()
    failure = ScrapeFailed(PROBLEM, TaskFailure.GATEWAY_ERROR, retryable=True)
    failure.is_spared, failure.sent, failure.waits_since = True, 0, clock.now()
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
    await clock.advance(30)
    task = make_task(clock)

    def verdict() -> Failed | Retry | Deferred:
        event = attempt_event(task, failure, started_at=clock.now(), ended_at=clock.now())
        return rules.decide(failure, task, make_job(), event=event, receives=1)

    await clock.advance(59)
    put_off = verdict()
    assert isinstance(put_off, Deferred)
    assert put_off.since == task.created_at
    await clock.advance(1)
    assert isinstance(verdict(), Failed)


async def test_a_task_may_stand_in_the_line_of_its_host_for_longer_than_its_deadline() -> None:
    clock = FakeClock()
    await clock.advance(100)
    now = clock.now()
    task = make_task(clock, waiting_since=now - 90_000, not_before=now)
    rules = RetryPolicy(clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
    event = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=clock.now(), ended_at=clock.now())
    for waiting, verdict in (
        (WaitReason.HOST_LIMIT, Retry),
        (WaitReason.HOST_RETRY_AFTER, Failed),
    ):
        put_off = Postponed(PROBLEM, TaskFailure.RATE_LIMITED, retry_after=9.0, waiting=waiting)
        decided = rules.decide(put_off, task, make_job(), event=event, receives=9)
        assert isinstance(decided, verdict)


class Refused:
    """A task that is refused again and again, by whatever `failure` says, with a deadline of 60
    seconds. Each refusal is judged a moment after its task was begun."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.task = make_task(clock)

    async def meets(self, failure: ScrapeFailed, *, after: float = 0.0) -> bool:
        """Be refused `after` seconds; return whether the task goes on."""
        await self.clock.advance(after)
        now = self.clock.now()
        event = attempt_event(self.task, failure, started_at=now, ended_at=now)
        rules = RetryPolicy(self.clock, base=1.0, cap=8.0, rate_limit_deadline=60.0)
        verdict = rules.decide(failure, self.task, make_job(), event=event, receives=9)
        if isinstance(verdict, Failed):
            return False
        self.task = msgspec.structs.replace(
            self.task, waiting_since=verdict.since, not_before=verdict.not_before
        )
        return True


def refusal(retry_after: float = 5.0) -> ScrapeFailed:
    return ScrapeFailed(
        PROBLEM,
        TaskFailure.RATE_LIMITED,
        retryable=True,
        retry_after=retry_after,
        burns_attempt=False,
    )


def put_off(waiting: WaitReason, seconds: float = 5.0) -> Postponed:
    return Postponed(PROBLEM, TaskFailure.RATE_LIMITED, retry_after=seconds, waiting=waiting)


@pytest.mark.parametrize(
    "refused", [refusal(), put_off(WaitReason.HOST_RETRY_AFTER)], ids=["answer", "closed host"]
)
async def test_the_deadline_counts_from_the_first_refusal_and_no_line(
    refused: ScrapeFailed,
) -> None:
    task = Refused(FakeClock())
    for _ in range(40):
        assert await task.meets(put_off(WaitReason.HOST_LIMIT), after=5)

    assert await task.meets(refused, after=5)
    first = task.clock.now()
    assert task.task.waiting_since == first
    # A line after a refusal does not count either.
    for _ in range(40):
        assert await task.meets(put_off(WaitReason.HOST_LIMIT), after=5)
    assert await task.meets(refused, after=5)
    while await task.meets(refused, after=5):
        pass
    assert task.clock.now() - first == 40 * 5_000 + 60_000


@pytest.mark.parametrize(
    "refused",
    [refusal(), put_off(WaitReason.HOST_RETRY_AFTER), put_off(WaitReason.OUTAGE)],
    ids=["answer", "closed host", "outage"],
)
async def test_of_a_time_in_which_nobody_began_a_task_a_quarter_of_the_deadline_counts(
    refused: ScrapeFailed,
) -> None:
    task = Refused(FakeClock())
    assert await task.meets(refused, after=5)
    # Its run was paused for a day, or no worker was there.
    goes_on = [await task.meets(refused, after=86_400) for _ in range(4)]
    assert goes_on[:2] == [True, True]
    assert not goes_on[3]


async def test_an_outage_that_lasts_counts_whoever_was_not_begun_meanwhile() -> None:
    task = Refused(FakeClock())
    away = ScrapeFailed(PROBLEM, TaskFailure.GATEWAY_ERROR, retryable=True)
    away.is_spared, away.sent, away.waits_since = True, 0, task.clock.now()
    assert await task.meets(away, after=1)
    assert not await task.meets(away, after=86_400)


async def test_a_clock_that_was_set_back_makes_no_task_fail_or_wait_for_longer() -> None:
    task = Refused(FakeClock())
    ahead = task.clock.now() + 3_600_000
    task.task = msgspec.structs.replace(task.task, waiting_since=ahead, not_before=ahead + 5_000)
    assert await task.meets(refusal(), after=5)
    assert task.task.waiting_since == task.clock.now()
    first = task.clock.now()
    while await task.meets(refusal(), after=5):
        pass
    assert task.clock.now() == first + 60_000
