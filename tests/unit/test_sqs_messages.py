"""Messages of SQS, readable or reported as unreadable: no content breaks the reader."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.ports.queues import (
    HOST_VERSION,
    DeleteMessage,
    ExportMessage,
    IngestMessage,
    Message,
    TaskMessage,
    TemplateMessage,
    task_message,
)
from conveyor.prod.sqs import messages as sqs_messages
from conveyor.prod.sqs.messages import (
    NO_HOST,
    NO_IDS,
    NO_INSTANT,
    NO_MESSAGE,
    NOT_BEFORE,
    OF_ANOTHER_KIND,
    OF_ANOTHER_VERSION,
    UnreadableMessage,
    entry,
    read,
    seconds_early,
)

NOW = 1_800_000_000_000
ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
HOSTED = json.dumps(
    {
        "type": "task",
        "job_id": ID,
        "run_id": ID,
        "task_id": ID,
        "version": HOST_VERSION,
        "host": "a.example:80",
    }
)
DELETION = json.dumps({"type": "delete", "job_id": ID, "run_id": ID})

ids = st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZ", min_size=26, max_size=26)
anything = st.text(st.characters(), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3),
    max_leaves=5,
)
messages = (
    st.builds(TaskMessage, ids, ids, ids)
    | st.builds(task_message, ids, ids, ids, st.just("") | st.text("abc.-[]:0", max_size=60))
    | st.builds(DeleteMessage, ids, ids, st.booleans())
    | st.builds(IngestMessage, ids, ids, anything.filter(lambda text: text.isprintable()))
    | st.builds(TemplateMessage, ids, ids, anything.filter(lambda text: text.isprintable()))
    | st.builds(ExportMessage, ids, ids, ids)
)
nearly = st.fixed_dictionaries(
    {"type": st.sampled_from(["task", "delete", "ingest", "template", "export"]) | values},
    optional=dict.fromkeys(
        ["job_id", "run_id", "task_id", "export_id", "final", "reason", "version", "host"],
        ids | values,
    ),
).map(json.dumps)
numbers = (
    st.integers().map(str)
    | st.floats().map(str)
    | anything
    | st.sampled_from(["1e400", "9" * 5_000])
)
attributes = st.none() | st.fixed_dictionaries(
    {"DataType": st.sampled_from(["Number", "String", "Binary"])}, optional={"StringValue": numbers}
)


def received(body: str, not_before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the messages of a receive."""
    made: dict[str, Any] = {"Body": body, "MessageId": "m", "ReceiptHandle": "r"}
    return made if not_before is None else {**made, "MessageAttributes": {NOT_BEFORE: not_before}}


@pytest.mark.slow
@given(body=anything | nearly | messages.map(msgspec.json.encode).map(bytes.decode), at=attributes)
def test_whatever_comes_is_a_message_or_told_to_be_none(
    body: str, at: dict[str, Any] | None
) -> None:
    raw = received(body, at)
    message = read(raw)
    if isinstance(message, UnreadableMessage):
        assert message.reason
        return
    assert 0 <= seconds_early(raw, now=NOW) < 10**18
    own = {name for name in message.__struct_fields__ if name.endswith("_id")}
    assert all(0 < len(getattr(message, name)) <= 64 for name in own)


@given(message=messages, delay=st.floats(0, 10**6))
def test_what_is_sent_is_read_again_and_no_sooner_than_it_may_be(
    message: Message, delay: float
) -> None:
    sent = entry(message, delay=delay, now=NOW)
    raw = received(sent["MessageBody"], sent.get("MessageAttributes", {}).get(NOT_BEFORE))
    assert read(raw) == message
    assert max(sent.get("DelaySeconds", 0), seconds_early(raw, now=NOW)) >= delay


def test_a_message_without_a_host_is_the_one_that_versions_before_sent() -> None:
    body = entry(TaskMessage(ID, ID, ID), delay=0, now=NOW)["MessageBody"]
    assert json.loads(body) == {
        "type": "task",
        "job_id": ID,
        "run_id": ID,
        "task_id": ID,
        "version": 1,
    }
    for kind in (DeleteMessage, IngestMessage, TemplateMessage):
        sent = entry(kind(ID, ID), delay=0, now=NOW)["MessageBody"]
        assert json.loads(sent)["version"] == 1


OLD_FORM = f'{{"type":"task","job_id":"{ID}","run_id":"{ID}","task_id":"{ID}","version":1}}'
NEW_FORM = OLD_FORM.replace('"version":1', '"version":2,"host":"a.example:80"')


def test_the_forms_of_old_and_new_messages_are_these_bytes_for_every_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = TaskMessage(ID, ID, ID), task_message(ID, ID, ID, "a.example:80")
    for form, message in ((OLD_FORM, old), (NEW_FORM, new)):
        assert entry(message, delay=0, now=NOW)["MessageBody"] == form
        assert read(received(form)) == message
    monkeypatch.setattr(sqs_messages, "MESSAGE_VERSION", 1)
    assert read(received(OLD_FORM)) == old
    assert read(received(NEW_FORM)) == UnreadableMessage(OF_ANOTHER_VERSION)


def test_versions_without_limits_of_hosts_leave_messages_with_a_host_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = entry(task_message(ID, ID, ID, "a.example:80"), delay=0, now=NOW)["MessageBody"]
    assert json.loads(body) == json.loads(HOSTED)
    monkeypatch.setattr(sqs_messages, "MESSAGE_VERSION", 1)
    message = read(received(body))
    assert message == UnreadableMessage(OF_ANOTHER_VERSION)
    assert message.may_be_read_elsewhere


def test_versions_without_schedules_leave_templates_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They know the other kinds, and do not read the order as one of those."""
    body = entry(TemplateMessage(ID, ID), delay=0, now=NOW)["MessageBody"]
    monkeypatch.setattr(sqs_messages, "_KINDS", {"task", "delete", "ingest", "export"})
    message = read(received(body))
    assert message == UnreadableMessage(OF_ANOTHER_KIND)
    assert message.may_be_read_elsewhere


@pytest.mark.parametrize(
    ("body", "at", "reason"),
    [
        ("", None, NO_MESSAGE),
        ("\x00", None, NO_MESSAGE),
        ('{"type":"\ud800"}', None, NO_MESSAGE),
        ('{"a":' + "[" * 100_000, None, NO_MESSAGE),
        ('{"type":"delete"}', None, NO_MESSAGE),
        ('{"version":1}', None, NO_MESSAGE),
        ('{"type":1,"version":3}', None, NO_MESSAGE),
        ('{"type":"delete","version":3}', None, OF_ANOTHER_VERSION),
        ('{"type":"new","version":3}', None, OF_ANOTHER_VERSION),
        ('{"type":"new"}', None, OF_ANOTHER_KIND),
        (DELETION.replace(ID, "", 1), None, NO_IDS),
        (DELETION.replace(ID, "a" * 3_000), None, NO_IDS),
        (DELETION.replace(ID, "../a", 1), None, NO_IDS),
        (HOSTED.replace("a.example:80", "a b"), None, NO_HOST),
        (HOSTED.replace("a.example:80", "\u00e9.example"), None, NO_HOST),
        (HOSTED.replace("a.example:80", "a" * 3_000), None, NO_HOST),
        (HOSTED.replace('"a.example:80"', "7"), None, NO_MESSAGE),
        (DELETION, {"DataType": "Number", "StringValue": "1.5"}, NO_INSTANT),
        (DELETION, {"DataType": "Number", "StringValue": "1e400"}, NO_INSTANT),
        (DELETION, {"DataType": "Binary", "BinaryValue": b"1"}, NO_INSTANT),
    ],
    ids=lambda value: str(value)[:20],
)
def test_why_it_is_none_is_said_and_nothing_of_it_shown(
    body: str, at: dict[str, Any] | None, reason: str
) -> None:
    assert read(received(body, at)) == UnreadableMessage(reason)
