"""Made-up events, for tests of receivers."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor import __version__
from conveyor.domain.deliveries import TEST_EVENT
from conveyor.domain.model import Job, JobStatus, Run, RunFailure, RunStats, RunStatus
from conveyor.domain.run_events import build_test_event, build_webhook_event
from conveyor.domain.signatures import SigningSecret, secret_bytes, sign
from conveyor.ports.clock import Clock

NEXT_KID = "01J0000000000000000000NEXT"
"""The id of a second key, which appears in no header."""


def sample_event(
    event_type: str, secrets: Sequence[str], *, kid: str, clock: Clock
) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of an event as a server would send them now, signed by the
    first secret, and by the second one as a rotation's candidate.

    Raises ValueError for a secret that cannot be one.
    """
    names = (kid, NEXT_KID)
    keys = [
        SigningSecret(name, secret_bytes(one)) for name, one in zip(names, secrets, strict=False)
    ]
    event_id, now = clock.new_id(), clock.now()
    body = _body(event_type, event_id, now, clock)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"conveyor/{__version__}",
        "X-ZenRows-Event-Id": event_id,
        "X-Conveyor-Attempt": "1",
    }
    if keys:
        active, candidate = keys[0], keys[1] if len(keys) > 1 else None
        headers |= sign(
            body,
            event_id=event_id,
            timestamp=now // 1_000,
            active=active,
            candidate=candidate,
        )
    return headers, body


def _body(event_type: str, event_id: str, now: int, clock: Clock) -> bytes:
    if event_type == TEST_EVENT:
        return build_test_event(event_id=event_id, now=now).encode()
    status = RunStatus(event_type.removeprefix("run."))
    job = Job(
        job_id=clock.new_id(),
        caller="",
        status=JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        external_id="order-7",
        metadata={"team": "prices"},
    )
    is_whole = status is RunStatus.COMPLETED
    run = Run(
        run_id=clock.new_id(),
        job_id=job.job_id,
        run_sequence=1,
        status=status,
        created_at=now,
        updated_at=now,
        stats=RunStats(
            total=10,
            successful=9 if is_whole else 3,
            failed=1,
            failure_reasons={"timeout": 1},
        ),
        failure_reason=RunFailure.INSUFFICIENT_CREDITS if status is RunStatus.FAILED else None,
        failure_detail="no credits are left" if status is RunStatus.FAILED else None,
    )
    return build_webhook_event(
        run, status, job, event_id=event_id, ended_at=now, origin="https://conveyor.example"
    )
