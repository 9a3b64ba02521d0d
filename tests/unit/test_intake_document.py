"""The document of a submit, as the child process reads it."""

from __future__ import annotations

import json

import msgspec
import pytest

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, InvalidTaskReason
from conveyor.domain.model import TaskSpec
from conveyor.domain.submission import Limits, parse_job
from conveyor.intake.frames import Chunk, Done, Head
from tests.unit.intake_lists import DOCUMENT_WORK, answer, refused, rows_of

URL = "http://a.example/"


def document(*tasks: object, **fields: object) -> bytes:
    """A submit."""
    return json.dumps({"tasks": list(tasks), **fields}).encode()


def test_a_head_comes_first_then_rows_then_their_count() -> None:
    tasks = [{"url": f"{URL}{i}", "external_id": f"x-{i}"} for i in range(12_345)]
    body = document(*tasks, name="n", metadata={"k": "v"}, zenrows_params={"wait": 3}, priority=7)
    frames = answer(DOCUMENT_WORK, body)
    whole = parse_job(json.loads(body), Limits())
    assert frames[0] == Head(msgspec.structs.replace(whole, specs=[]), 12_345)
    assert [frame.count for frame in frames if isinstance(frame, Chunk)] == [10_000, 2_345]
    assert rows_of(frames) == whole.specs
    assert frames[-1] == Done(12_345, 12_345)


def test_a_document_without_tasks_is_a_head_and_no_row() -> None:
    frames = answer(DOCUMENT_WORK, document(status="open"))
    assert isinstance(frames[0], Head)
    assert frames[0].tasks == 0
    assert frames[1:] == [Done(0, 0)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"tasks": [',
        b'{"tasks": []}',
        document({"url": "x"}, {"url": URL}, {"url": URL, "method": "PUT"}),
        document({"url": URL}, priority=10),
        document(*[{"url": URL}] * 4),
        document(*[{"url": URL}] * 3, status="open"),
    ],
)
def test_what_a_submit_refuses_is_refused_in_the_same_words(body: bytes) -> None:
    limits = Limits(max_inline_tasks=3, max_open_job_tasks=2)
    work = msgspec.structs.replace(DOCUMENT_WORK, limits=limits)
    refusal = refused(work, body)
    assert answer(work, body) == [refusal]
    with pytest.raises(ConveyorError) as raised:
        parse_job(strict_json.decode(body), limits)
    expected = raised.value
    assert (refusal.code, refusal.detail) == (expected.code, expected.detail)
    assert refusal.invalid_tasks == expected.invalid_tasks


def test_nothing_is_emitted_before_the_last_task_was_checked() -> None:
    body = document(*[{"url": URL}] * 12_000, {"url": "x"})
    assert answer(DOCUMENT_WORK, body) == [refused(DOCUMENT_WORK, body)]


def test_every_bad_task_is_listed_however_many() -> None:
    refusal = refused(DOCUMENT_WORK, document(*[{"url": "x"}] * 20_000, {"url": URL}))
    assert refusal.detail == "20000 of 20001 tasks are invalid; nothing was created"
    assert [task.index for task in refusal.invalid_tasks] == list(range(20_000))
    assert {task.reason for task in refusal.invalid_tasks} == {InvalidTaskReason.MALFORMED_URL}


def test_tasks_of_every_kind_keep_their_form() -> None:
    tasks = [
        {"url": "http://[::1]/ä", "metadata": {"q": '"\\'}},
        {"url": URL, "method": "POST", "body": "a=b"},
        {"url": URL, "zenrows_params": {"premium_proxy": True}},
    ]
    body = document(*tasks)
    assert rows_of(answer(DOCUMENT_WORK, body)) == parse_job(json.loads(body), Limits()).specs
    assert rows_of(answer(DOCUMENT_WORK, document(tasks[0])))[0] == TaskSpec(
        "http://[::1]/ä", metadata={"q": '"\\'}
    )
