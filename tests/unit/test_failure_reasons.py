"""The causes that end a whole run, as answers and events tell them."""

from __future__ import annotations

import json

import pytest
from zenrows.batch.models import FailureReason
from zenrows.batch.models import Run as ClientRun

from conveyor.domain.model import ACCOUNT_FAILURES, Run, RunFailure, RunStatus
from conveyor.domain.run_events import build_run_event
from conveyor.service.responses import encode, run_body

RUN_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
KNOWN = {cause.value for cause in FailureReason}


def failed(cause: RunFailure) -> Run:
    return Run(
        run_id=RUN_ID,
        job_id=RUN_ID,
        run_sequence=1,
        status=RunStatus.FAILED,
        created_at=0,
        updated_at=0,
        failure_reason=cause,
        failure_detail="why",
    )


def test_the_account_fails_for_what_the_published_client_knows() -> None:
    assert {cause.value for cause in ACCOUNT_FAILURES} == KNOWN


@pytest.mark.parametrize("cause", RunFailure)
def test_a_cause_that_the_client_does_not_know_is_left_to_the_detail(cause: RunFailure) -> None:
    answered = json.loads(encode(run_body(failed(cause), waits=lambda _run: None)))
    event = json.loads(
        build_run_event(
            failed(cause), None, None, job_id=RUN_ID, run_id=RUN_ID, event_id="e", now=0
        ).event
    )

    for told in (answered, event):
        assert told["failure_detail"] == "why"
        assert told.get("failure_reason") == (cause.value if cause.value in KNOWN else None)
    assert ClientRun.model_validate(answered).status.value == "failed"
