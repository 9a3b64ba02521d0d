"""Recordings of a gateway, and the answers from them."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest

from conveyor.bootstrap.recording import (
    NO_RECORDING,
    RecordedGateway,
    RecordingChoice,
    open_recorded,
)
from conveyor.clock import SystemClock
from conveyor.dev.recordings import BODIES, LOG, SMALL, open_recorder, open_recordings
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Problem, Spend, TaskBody, TaskFailure, WaitReason
from conveyor.gateway.fake import FakeGateway, expected_body
from conveyor.gateway.recording import RecordingGateway, ReplayGateway
from conveyor.gateway.redaction import GrowingNames
from conveyor.gateway.ruled import RuledGateway
from conveyor.ports.gateway import (
    Absence,
    Gateway,
    HostRefusal,
    Postponed,
    ScrapeFailed,
    ScrapeRequest,
    Shared,
    Success,
)
from tests.acceptance.support_wire import target
from tests.disk import files_below


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


KEY = "k-5f0c9a77e1d24b"
Answer = tuple[Any, ...]


def asked(page: str, *, order: int = 0, key: str = KEY, **behaviour: Any) -> ScrapeRequest:
    return ScrapeRequest(target(page, **behaviour), key, order=order)


@asynccontextmanager
async def recording(directory: Path, gateway: Gateway | None = None) -> AsyncIterator[Gateway]:
    clock = SystemClock()
    recorder = await open_recorder(directory)
    recorded = RecordingGateway(gateway or FakeGateway(clock), recorder, clock)
    try:
        yield recorded
    finally:
        await recorded.aclose()


@asynccontextmanager
async def replaying(directory: Path, other: Gateway | None = None) -> AsyncIterator[Gateway]:
    replay = ReplayGateway(await open_recordings(directory), other)
    try:
        yield replay
    finally:
        await replay.aclose()


async def answer(gateway: Gateway, request: ScrapeRequest) -> Answer:
    """All that a worker learns from a call."""
    try:
        async with gateway.scrape(request) as success:
            content = success.content
            whole = content if isinstance(content, bytes) else b"".join([p async for p in content])
            told = (whole, success.content_type, success.spend, success.sent, success.status)
            return (*told, isinstance(content, bytes))
    except ScrapeFailed as failed:
        shared = None if failed.absence is None else failed.absence.shared
        return (
            type(failed).__name__,
            failed.problem,
            failed.failure,
            failed.retryable,
            failed.retry_after,
            failed.burns_attempt,
            failed.account,
            failed.spend,
            failed.sent,
            failed.absence is not None,
            shared,
            failed.waiting if isinstance(failed, Postponed) else None,
            failed.refusal,
        )


REQUESTS = [
    asked("plain"),
    asked("size", size=SMALL + 1, type="application/pdf"),
    asked("coded", size=3 * SMALL, encoding="gzip", chunked=True),
    asked("none", body=""),
    asked("paid", cost="0.5", credits="3"),
    asked("gone", status=404, code="gone", detail="no such page"),
    asked("busy", status=429, retry_after="7"),
    asked("down", status=503, retry_after="2"),
    asked("account", account="insufficient_credits"),
    asked("reset", reset="1"),
    asked("cut", size=3 * SMALL, short=True),
    asked("damaged", encoding="gzip", truncate=True, size=900),
]


async def test_every_kind_of_answer_comes_back_as_it_was_twice(tmp_path: Path) -> None:
    async with recording(tmp_path / "r") as gateway:
        seen = [await answer(gateway, request) for request in REQUESTS]
    assert len({told[0] for told in seen if isinstance(told[0], bytes)}) == 5
    for _ in range(2):
        async with replaying(tmp_path / "r") as gateway:
            assert [await answer(gateway, request) for request in REQUESTS] == seen


class Away(FakeGateway):
    """A gateway that is not there, or that has been asked for a pause."""

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        problem = Problem("gone", "away", 502)
        failed = ScrapeFailed(problem, TaskFailure.GATEWAY_ERROR, retryable=True)
        failed.absence, failed.sent = Absence(Shared.RESOLVER), 0
        if "postponed" in request.url:
            reason = WaitReason.HOST_RETRY_AFTER
            failed = Postponed(problem, TaskFailure.RATE_LIMITED, retry_after=2.5, waiting=reason)
        if "refused" in request.url:
            failed.refusal = HostRefusal("a.test:80", 7.5, is_private=True)
        if request.url:
            raise failed
        yield Success(b"", "text/plain")


async def test_absence_postponement_and_refusal_come_back(tmp_path: Path) -> None:
    requests = [asked("postponed"), asked("away"), asked("refused")]
    async with recording(tmp_path / "r", Away(SystemClock())) as gateway:
        seen = [await answer(gateway, request) for request in requests]
    async with replaying(tmp_path / "r") as gateway:
        assert [await answer(gateway, request) for request in requests] == seen


async def test_answers_to_one_key_come_in_order_and_the_last_one_stays(tmp_path: Path) -> None:
    flaky = asked("flaky", flaky=2)
    async with recording(tmp_path / "r") as gateway:
        seen = [await answer(gateway, flaky) for _ in range(3)]
    async with replaying(tmp_path / "r") as gateway:
        assert [await answer(gateway, flaky) for _ in range(5)] == [*seen, seen[2], seen[2]]


async def test_tasks_that_are_answered_as_one_do_not_move_each_other_on(tmp_path: Path) -> None:
    requests = [asked("flaky", flaky=2, order=order) for order in range(3)]
    async with recording(tmp_path / "r") as gateway:
        seen = [await answer(gateway, requests[0]) for _ in range(3)]
    async with replaying(tmp_path / "r") as gateway:
        for told in seen:
            assert [await answer(gateway, request) for request in requests] == [told] * 3


class Numbered(FakeGateway):
    """A gateway whose page depends on the key that a URL holds."""

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        number = int(request.url.rpartition("-")[2])
        yield Success(f"page {number}".encode(), "text/plain")


def hidden(number: int, *, order: int) -> ScrapeRequest:
    return ScrapeRequest(f"http://fake.test/x?api_key=secret-{number:04}", KEY, order=order)


async def test_tasks_that_differ_in_secrets_alone_are_told_apart_by_their_order(
    tmp_path: Path,
) -> None:
    places = [5, 2, 9, 0]
    async with recording(tmp_path / "r", Numbered(SystemClock())) as gateway:
        seen = {place: await answer(gateway, hidden(place, order=place)) for place in places}
    async with replaying(tmp_path / "r") as gateway:
        for place in sorted(places):
            assert await answer(gateway, hidden(place + 100, order=place)) == seen[place]
    async with replaying(tmp_path / "r") as gateway:
        moved = [await answer(gateway, hidden(0, order=10 + number)) for number in range(5)]
        assert moved == [seen[place] for place in (0, 2, 5, 9, 9)]
        assert await answer(gateway, hidden(0, order=11)) == seen[2]


class Same(FakeGateway):
    """A gateway with one page."""

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        yield Success(b"page", "text/plain")


def shop(path: str, token: str, **fields: Any) -> ScrapeRequest:
    return ScrapeRequest(f"http://shop.test{path}?token={token}", KEY, **fields)


POSTED = "application/x-www-form-urlencoded"
SAME_REQUEST = [
    # What is secret for one stands in the rest of what both ask for.
    (shop("/item/4711", "4711-4711"), shop("/item/4711", "other-token")),
    (shop("/item/4711", "4711"), shop("/item/4711", "other-token")),
    (shop("/item/4711", "other-token"), shop("/item/4711", "4711")),
    (shop("/shop/1", "shop"), shop("/shop/1", "other")),
    (
        shop("/a", "colour", params={"wait_for": ".colours"}),
        shop("/a", "taste", params={"wait_for": ".colours"}),
    ),
    (
        shop("/a", "size", method="POST", body=TaskBody("size=5", POSTED)),
        shop("/a", "taste", method="POST", body=TaskBody("size=5", POSTED)),
    ),
    (
        shop("/a", "taste", method="POST", body=TaskBody("size=5", POSTED)),
        shop("/a", "size", method="POST", body=TaskBody("size=5", POSTED)),
    ),
    # What is secret stands in the rest by intent.
    (shop("/users/first-token", "first-token"), shop("/users/other-token", "other-token")),
]


@pytest.mark.parametrize(("recorded", "other"), SAME_REQUEST)
async def test_a_secret_that_stands_in_the_rest_of_a_request_makes_no_replay_miss(
    tmp_path: Path, recorded: ScrapeRequest, other: ScrapeRequest
) -> None:
    async with recording(tmp_path / "r", Same(SystemClock())) as gateway:
        seen = await answer(gateway, recorded)
    assert recorded.url.rpartition("=")[2] not in (tmp_path / "r" / LOG).read_text()
    async with replaying(tmp_path / "r") as gateway:
        assert await answer(gateway, recorded) == seen
        assert await answer(gateway, other) == seen
        changed = msgspec.structs.replace(other, url=other.url.replace("shop.test", "shop.other"))
        assert (await answer(gateway, changed))[1].code == "not_recorded"


async def test_a_url_of_which_nothing_is_left_answers_no_other(tmp_path: Path) -> None:
    packed = ScrapeRequest(f"http://shop.test/{KEY.encode().hex()}{KEY}", KEY)
    async with recording(tmp_path / "r", Same(SystemClock())) as gateway:
        await answer(gateway, packed)
    async with replaying(tmp_path / "r") as gateway:
        other = await answer(gateway, ScrapeRequest("http://shop.test/other", "another-key"))
    assert other[1].code == "not_recorded"


async def test_a_replay_that_is_rewound_begins_with_the_first_answers(tmp_path: Path) -> None:
    requests = [asked("flaky", flaky=2)] * 3
    async with recording(tmp_path / "r") as gateway:
        seen = [await answer(gateway, request) for request in requests]
    assert seen[0] != seen[2]
    replay = ReplayGateway(await open_recordings(tmp_path / "r"))
    for _ in range(2):
        assert [await answer(replay, request) for request in requests] == seen
        await replay.rewind()
    await replay.aclose()


async def test_samples_are_pages_that_a_task_of_its_url_alone_is_answered_with(
    tmp_path: Path,
) -> None:
    plain = [asked(name) for name in "abcd"]
    others = [
        asked("gone", status=404),
        asked("long", words="x" * 200),
        ScrapeRequest(target("rendered"), KEY, params={"js_render": "true"}),
        ScrapeRequest(f"{target('told', body='hi')}&apikey={KEY}", KEY),
    ]
    async with recording(tmp_path / "r") as gateway:
        for request in [*others, plain[0], *plain]:
            await answer(gateway, request)
    recordings = await open_recordings(tmp_path / "r")
    samples = await recordings.samples(3)
    assert samples == [request.url for request in plain[:3]]
    replay = ReplayGateway(recordings)
    for url in samples:
        assert len(await answer(replay, ScrapeRequest(url, "another-key"))) == 6
    await replay.aclose()


async def test_an_answer_with_a_secret_is_withheld(tmp_path: Path) -> None:
    clean, told, large = (
        asked("clean"),
        asked("told", body=f"your key is {KEY}"),
        asked("large", echo=True, key=KEY),
    )
    header = msgspec.structs.replace(
        asked("type", type=f"text/{KEY}"), params={"custom_headers": json.dumps({"X-A": KEY})}
    )
    async with recording(tmp_path / "r") as gateway:
        assert isinstance(gateway, RecordingGateway)
        for request in (clean, told, header, large):
            await answer(gateway, request)
        withheld = gateway.withheld
    kept = b"".join(path.read_bytes() for path in files_below(tmp_path / "r"))
    assert KEY.encode() not in kept
    assert withheld.hosts == ("fake.test",)
    async with replaying(tmp_path / "r") as gateway:
        assert (await answer(gateway, clean))[0] == expected_body(clean.url)
        for request in (told, header):
            assert (await answer(gateway, request))[1].code == "secret_in_answer"
    verdicts = [json.loads(line).get("verdict") for line in lines(tmp_path / "r")[1:-1]]
    assert verdicts.count("secret_in_answer") == withheld.answers >= 2


def lines(directory: Path) -> list[str]:
    return (directory / LOG).read_text().splitlines()


async def test_a_call_that_is_not_recorded_says_what_differs(tmp_path: Path) -> None:
    async with recording(tmp_path / "r") as gateway:
        for page in ("a", "shoes", "z"):
            await answer(gateway, asked(page, size=5))
    async with replaying(tmp_path / "r") as gateway:
        wanted = {
            asked("shoes", size=7).url: "query size",
            asked("shoe", size=5).url: "path /shoe",
        }
        for url, difference in wanted.items():
            failed = (await answer(gateway, ScrapeRequest(url, KEY)))[1]
            assert (failed.code, failed.status) == ("not_recorded", 422)
            assert (
                failed.detail == f"differs from GET {asked('shoes', size=5).url} in: " + difference
            )
        given = msgspec.structs.replace(asked("z", size=5), params={"js_render": "true"})
        assert (await answer(gateway, given))[1].detail.endswith(" in: param js_render")
        failed = (await answer(gateway, ScrapeRequest("http://other.test/", KEY)))[1]
        assert failed.detail == "nothing of this host is recorded"


async def test_what_is_missing_is_called_and_added_on_request(tmp_path: Path) -> None:
    directory, clock = tmp_path / "r", SystemClock()
    async with recording(directory) as gateway:
        await answer(gateway, asked("a"))
    before = lines(directory)
    async with replaying(directory, FakeGateway(clock)) as gateway:
        assert (await answer(gateway, asked("b")))[0] == expected_body(asked("b").url)
    assert lines(directory) == before
    flaky = asked("c", flaky=1)
    for _ in range(2):  # the second time nothing is missing
        recordings = await open_recordings(directory, adds=True)
        adding = RecordingGateway(FakeGateway(clock), recordings.recorder(), clock)
        gateway = ReplayGateway(recordings, adding)
        assert (await answer(gateway, asked("a")))[0] == expected_body(asked("a").url)
        assert [len(await answer(gateway, flaky)) for _ in range(2)] == [13, 6]
        await gateway.aclose()
    assert [*before[:2], '{"exchanges":3}'] == [*lines(directory)[:2], lines(directory)[-1]]
    async with replaying(directory) as gateway:
        assert [len(await answer(gateway, flaky)) for _ in range(2)] == [13, 6]


async def test_a_recording_that_is_added_to_is_whole_after_each_addition(tmp_path: Path) -> None:
    directory, clock = tmp_path / "r", SystemClock()
    async with recording(directory) as gateway:
        await answer(gateway, asked("a"))
    recordings = await open_recordings(directory, adds=True)
    adding = RecordingGateway(FakeGateway(clock), recordings.recorder(), clock)
    gateway = ReplayGateway(recordings, adding)
    for number, page in enumerate("bcdefghijkl"):
        await answer(gateway, asked(page))
        copytree(directory, tmp_path / page)  # what a kill would leave here
        async with replaying(tmp_path / page) as copied:
            for known in "abcdefghijkl"[: number + 2]:
                assert (await answer(copied, asked(known)))[0] == expected_body(asked(known).url)
    await gateway.aclose()


async def test_names_that_rules_add_later_are_redacted_from_the_next_call_on(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    ruled = RuledGateway(clock)
    recorder = await open_recorder(tmp_path)
    recorded = RecordingGateway(ruled, recorder, clock, GrowingNames(ruled.names))
    for rules in ("[redact]\nquery = ['kunde']", "[redact]\nquery = ['ort']"):
        ruled.install(rules.encode(), is_toml=True)
        await answer(recorded, asked("a", kunde="maria-1", ort="berlin-2"))
    await recorded.aclose()
    first, second = (json.loads(line)["url"] for line in lines(tmp_path)[1:-1])
    assert ("kunde=***" in first, "ort=berlin-2" in first) == (True, True)
    assert ("kunde=***" in second, "ort=***" in second) == (True, True)


async def test_a_directory_with_a_recording_is_left_alone(tmp_path: Path) -> None:
    async with recording(tmp_path) as gateway:
        await answer(gateway, asked("a"))
    before = {path: path.read_bytes() for path in files_below(tmp_path)}
    with pytest.raises(ConveyorError, match="holds a recording already"):
        await open_recorder(tmp_path)
    assert {path: path.read_bytes() for path in files_below(tmp_path)} == before


async def test_a_body_that_was_not_read_to_its_end_is_not_recorded(tmp_path: Path) -> None:
    large = asked("large", size=5 * SMALL)
    async with recording(tmp_path) as gateway, gateway.scrape(large) as success:
        assert not isinstance(success.content, bytes)
        await anext(success.content)
    assert lines(tmp_path) == ['{"form":1}', '{"exchanges":0}']
    assert list(files_below(tmp_path / BODIES)) == []


def cut(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-30])


def without_foot(log: Path) -> None:
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")


def without_a_line(log: Path) -> None:
    kept = log.read_text().splitlines()
    log.write_text("\n".join([kept[0], *kept[2:]]) + "\n")


def newer(log: Path) -> None:
    log.write_text(log.read_text().replace('{"form":1}', '{"form":2,"more":true}'))


def spoilt(log: Path) -> None:
    log.write_text(log.read_text().replace('"verdict":"ok"', '"verdict":"fine"', 1))


def led_astray(log: Path) -> None:
    digest = json.loads(log.read_text().splitlines()[1])["body"]
    log.write_text(log.read_text().replace(digest, "../../../etc/passwd"))


def other_bytes(log: Path) -> None:
    (body,) = files_below(log.parent / BODIES)
    body.write_bytes(b"other")


def no_body(log: Path) -> None:
    for body in files_below(log.parent / BODIES):
        body.unlink()


def without_refusal(log: Path) -> None:
    head, one, other, foot = log.read_text().splitlines()
    fields = json.loads(other)
    del fields["refusal"]
    log.write_text("\n".join([head, one, json.dumps(fields), foot]) + "\n")


def far_away(log: Path) -> None:
    log.write_text(log.read_text().replace('"verdict"', f'"order":{2**63},"verdict"', 1))


def directory_for_body(log: Path) -> None:
    (body,) = files_below(log.parent / BODIES)
    body.unlink()
    body.mkdir()


def directory_for_log(log: Path) -> None:
    log.unlink()
    log.mkdir()


def pipe_for_body(log: Path) -> None:
    (body,) = files_below(log.parent / BODIES)
    body.unlink()
    os.mkfifo(body)


def pipe_for_log(log: Path) -> None:
    log.unlink()
    os.mkfifo(log)


def of_no_form(log: Path) -> None:
    log.write_text(log.read_text().replace('{"form":1}', '{"form":true}'))


def empty(log: Path) -> None:
    log.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut, "is cut"),
        (without_foot, "is cut"),
        (without_a_line, "says 2 exchanges in line 3"),
        (newer, "is of form 2; this version reads up to 1"),
        (spoilt, "line 2 is no exchange"),
        (led_astray, "a body that is no digest"),
        (other_bytes, "does not fit its digest"),
        (no_body, "is missing"),
        (without_refusal, "line 3 is no exchange"),
        (far_away, "line 2 is no exchange"),
        (directory_for_body, "cannot be read"),
        (directory_for_log, "cannot be read"),
        (pipe_for_body, "does not fit its digest"),
        (pipe_for_log, "is no regular file"),
        (of_no_form, "is no recording"),
        (empty, "is no recording"),
        (Path.unlink, "holds no recording"),
    ],
)
async def test_a_damaged_recording_is_refused_in_one_line(
    tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    async with recording(tmp_path) as gateway:
        await answer(gateway, asked("a"))
        await answer(gateway, asked("b", status=404))
    harm(tmp_path / LOG)
    with pytest.raises(ConveyorError) as refused:
        await open_recordings(tmp_path)
    assert reason in refused.value.detail
    assert "\n" not in refused.value.detail


async def test_a_file_in_place_of_a_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ConveyorError, match="cannot be read: Not a directory"):
        await open_recordings(file)
    with pytest.raises(ConveyorError, match="cannot be written: Not a directory"):
        await open_recorder(file / "x")


async def test_a_full_disk_ends_the_recording_and_not_the_calls(tmp_path: Path) -> None:
    async with recording(tmp_path) as gateway:
        assert isinstance(gateway, RecordingGateway)
        (tmp_path / BODIES).rmdir()
        assert (await answer(gateway, asked("a")))[0] == expected_body(asked("a").url)
        assert (await answer(gateway, asked("b", size=3 * SMALL)))[4] == 200
        assert not gateway.is_whole
    with pytest.raises(ConveyorError, match="is cut"):
        await open_recordings(tmp_path)


async def test_equal_bodies_are_kept_once_and_spend_is_kept(tmp_path: Path) -> None:
    async with recording(tmp_path) as gateway:
        for name in ("a", "b", "c"):
            await answer(gateway, asked(name, body="same", cost="0.25", credits="2"))
    (body,) = files_below(tmp_path / BODIES)
    line = json.loads(lines(tmp_path)[1])
    assert (body.name, body.read_bytes()) == (line["body"], b"same")
    assert msgspec.convert(line["spend"], Spend) == Spend(2, 0.25)
    assert set(line) == {
        "key", "verdict", "status", "content_type", "spend", "ms", "body", "url",
    }  # fmt: skip


@asynccontextmanager
async def serving(choice: RecordingChoice = NO_RECORDING) -> AsyncIterator[RecordedGateway]:
    """The gateway of a server, whose recording can be another."""
    clock = SystemClock()
    gateway = await open_recorded(choice, lambda: FakeGateway(clock), clock, None)
    try:
        yield gateway
    finally:
        await gateway.aclose()


async def test_a_change_that_is_refused_leaves_what_is_answered_from(tmp_path: Path) -> None:
    """A test that believes itself offline must not call the sites."""
    kept = tmp_path / "kept"
    (tmp_path / "full").touch()
    async with recording(kept) as recorded:
        await answer(recorded, asked("plain"))
    async with serving() as gateway:
        await gateway.replay(str(kept))
        for change in (
            gateway.replay(str(tmp_path / "typo")),
            gateway.replay(str(kept), missing="typo"),
            gateway.record(str(tmp_path / "full")),
            gateway.record(str(kept)),
        ):
            with pytest.raises(ConveyorError):
                await change
            assert gateway.recording().replay == str(kept)
            assert "NOT_RECORDED" in str(await answer(gateway, asked("other"))).upper()
            assert (await answer(gateway, asked("plain")))[0] == expected_body(target("plain"))
        # The same directory may be answered from in another way, or from its beginning.
        for missing in ("record", "fail", "fail"):
            await gateway.replay(str(kept), missing=missing)
        assert (await gateway.end_recording()).replay == str(kept)
        assert (await answer(gateway, asked("other")))[0] == expected_body(target("other"))


async def test_what_was_withheld_is_told_where_a_recording_is_replaced_or_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = asked("told", body=KEY)
    async with serving() as gateway:
        await gateway.record(str(tmp_path / "one"))
        await answer(gateway, request)
        await gateway.record(str(tmp_path / "two"))
        await answer(gateway, request)
        await gateway.rewind()
    assert [line.partition(" answers")[0] for line in caplog.messages] == ["not recorded: 1"] * 2
