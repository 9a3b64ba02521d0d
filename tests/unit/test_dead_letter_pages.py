"""Dead letters on pages: who sees them, who moves them, and what stands on the page."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.domain.api_keys import key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.auth import open_api_keys
from conveyor.http.pages.routes import PAGE_HEADERS
from conveyor.http.pages.views import LETTERS, ROOT
from conveyor.ports.dead_letters import DeadLetter, LetterPage
from conveyor.service.dead_letters import LETTERS_SHOWN, MOST_REASON, OperatorLetters
from conveyor.service.results import Cursors
from tests.unit.http_api import KEY, OTHER_KEY, Api, open_api, problem_of
from tests.unit.test_page_actions import OPERATOR, READER, SESSIONS, Person, person

JOB, RUN, TASK = "01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW", f"{'0' * 25}7"
SENT, KEPT = 1_700_000_000_000, 1_701_209_600_000
HOSTILE = "<script>alert('a')</script>\"'`{{7*7}}"
LOST = "its run has no queue any more"


class LetterBox:
    """A queue of letters in memory; those in `stuck` cannot go back."""

    def __init__(self) -> None:
        self.letters: dict[str, DeadLetter] = {}
        self.back: list[str] = []
        self.stuck: set[str] = set()
        self.is_cut = False
        self.is_away = False

    def put(self, letter_id: str, **fields: str | int) -> None:
        """Give a message up."""
        letter = {"first_sent": SENT, "kept_until": KEPT, **fields}
        self.letters[letter_id] = DeadLetter(letter_id=letter_id, **letter)  # type: ignore[arg-type]

    async def page(self, after: tuple[int, str] | None, *, limit: int) -> LetterPage:
        if self.is_away:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "sqs does not answer", retry_after=5)
        shown = sorted(self.letters.values(), key=lambda one: one.place)
        behind = [one for one in shown if after is None or one.place > after]
        return LetterPage(behind[:limit], len(shown), len(behind) > limit, self.is_cut)

    async def redrive(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        found = self.letters.keys() if chosen is None else self.letters.keys() & chosen
        done = {one: LOST if one in self.stuck else None for one in found}
        gone = [one for one, problem in done.items() if problem is None]
        self.back += gone
        for one in gone:
            del self.letters[one]
        return done

    async def drop(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        found = self.letters.keys() if chosen is None else self.letters.keys() & chosen
        done: dict[str, str | None] = dict.fromkeys(found)
        self.letters = {name: one for name, one in self.letters.items() if name not in done}
        return done


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def box() -> LetterBox:
    made = LetterBox()
    made.put("one", kind="task", job_id=JOB, run_id=RUN, task_id=TASK)
    made.put("two", kind="ingest", job_id=JOB, run_id=RUN, reason=HOSTILE, first_sent=SENT + 1)
    made.put("three", reason="its body is not a message", first_sent=SENT + 2)
    return made


@pytest.fixture
async def api(tmp_path: Path, box: LetterBox) -> AsyncIterator[Api]:
    keys = open_api_keys(f"{key_hash(KEY)},{key_hash(OTHER_KEY)}")
    async with open_api(
        tmp_path / "data", api_keys=keys, sessions=SESSIONS, dead_letters=box
    ) as opened:
        yield opened


async def shown(who: Person, address: str = LETTERS) -> str:
    """The page, which is small and has the headers of all pages."""
    answer = await who.http.get(address)
    assert answer.status_code == 200, answer.text
    assert {name: answer.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS
    assert len(answer.content) <= 120 * 1_024
    return answer.text


# -- what is seen --


@pytest.mark.parametrize("key", [OPERATOR, READER])
async def test_an_operator_sees_the_letters_of_all_callers(api: Api, key: str) -> None:
    who = await person(api, key)
    page = await shown(who)
    assert re.findall(r"<bdi>(one|two|three)</bdi>", page) == ["one", "two", "three"]
    run = f"{ROOT}/jobs/{JOB}/runs/{RUN}"
    for part in (f'href="{run}"', f'href="{run}/tasks/{TASK}"', "its body is not a message"):
        assert part in page
    for part in ("Received too often, no reason given", "cannot be read", "2023-11-14 22:13:20"):
        assert part in page
    assert "2023-11-28 22:13:20" in page
    assert html.escape(HOSTILE) in page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    assert "<script>alert" not in page
    assert ("/redrive" in page, "/drop" in page) == (key == OPERATOR,) * 2
    assert f'<a href="{LETTERS}" aria-current="page">' in page
    assert f'href="{LETTERS}"' in await shown(who, ROOT)


async def test_the_letters_are_there_as_json_too(api: Api) -> None:
    who = await person(api, READER)
    twin = (await who.http.get(f"{LETTERS}.json")).json()
    assert (twin["has_queue"], twin["is_cut"], twin["looked"]) == (True, False, 3)
    assert twin["letters"][0] == {
        "letter_id": "one",
        "kind": "task",
        "job_id": JOB,
        "run_id": RUN,
        "task_id": TASK,
        "first_sent_at": "2023-11-14T22:13:20.000Z",
        "kept_until": "2023-11-28T22:13:20.000Z",
    }
    assert twin["letters"][1]["reason"] == HOSTILE
    assert "next_cursor" not in twin


async def test_letters_come_by_pages_that_stay_small(api: Api, box: LetterBox) -> None:
    box.letters.clear()
    wide = "\u0001<&\"'" * 10_000
    names = [f"{number:03}-{'a' * 96}" for number in range(2 * LETTERS_SHOWN + 1)]
    ids = {"job_id": "j" * 64, "run_id": "r" * 64, "task_id": "t" * 64}
    for number, name in enumerate(names):
        box.put(name, kind="task", reason=wide, first_sent=SENT + number // 7, **ids)
    box.is_cut = True
    who = await person(api, OPERATOR)
    address, found = LETTERS, []
    for _ in range(3):
        page = await shown(who, address)
        assert f"of {len(names)} letters that were looked through" in page
        found += re.findall(r'action="[^"]+/([^"/]+)/redrive"', page)
        twin = await who.http.get(address.replace(LETTERS, f"{LETTERS}.json"))
        assert {len(one["reason"]) for one in twin.json()["letters"]} == {MOST_REASON}
        onward = re.search(r'rel="next" href="([^"]+)"', page)
        address = html.unescape(onward[1]) if onward else ""
    assert (found, address) == (names, "")


async def test_a_cursor_of_another_list_is_refused(api: Api) -> None:
    who = await person(api, OPERATOR)
    assert (await who.http.get(f"{LETTERS}?cursor=AAAA")).status_code == 400


async def test_no_letters_and_a_queue_that_does_not_answer(api: Api, box: LetterBox) -> None:
    who = await person(api, OPERATOR)
    box.letters.clear()
    assert "There is none" in await shown(who)
    box.is_away = True
    answer = await who.http.get(LETTERS)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    problem_of(await who.http.get(f"{LETTERS}.json"), status=503, code="unavailable")


# -- who else --


@pytest.mark.guarantee("G15")
@pytest.mark.parametrize("key", [KEY, None])
async def test_nobody_else_sees_or_moves_a_letter(
    api: Api, box: LetterBox, key: str | None
) -> None:
    """Neither a caller, nor somebody on the machine of a fleet's server."""
    await api.submit(1)
    who = await person(api, key)
    for address in (LETTERS, f"{LETTERS}.json", f"{LETTERS}?cursor=AAAA"):
        answer = await who.http.get(address)
        assert (answer.status_code, "there is no such page" in answer.text) == (404, True)
    assert "dead" not in (await who.http.get(ROOT)).text.lower()
    token = await who.token()
    for action in ("redrive", "drop"):
        answer = await who.http.post(f"{LETTERS}/one/{action}", data={"token": token})
        assert answer.status_code == 404
    assert (len(box.letters), box.back) == (3, [])


async def test_whoever_is_not_signed_in_is_asked_for_a_key(api: Api) -> None:
    stranger = Person(api, "https://conveyor.test")
    assert (await stranger.http.get(LETTERS)).status_code == 401
    problem_of(await stranger.http.get(f"{LETTERS}.json"), status=401, code="unauthenticated")


@pytest.mark.parametrize("key", [None, OPERATOR])
async def test_a_development_server_says_that_it_keeps_none(
    tmp_path: Path, key: str | None
) -> None:
    async with open_api(tmp_path / "data", sessions=SESSIONS) as api:
        await api.submit(1)
        who = await person(api, key)
        assert "A development server keeps none" in await shown(who)
        twin = (await who.http.get(f"{LETTERS}.json")).json()
        assert (twin["has_queue"], twin["letters"]) == (False, [])
        token = await who.token()
        for action in ("redrive", "drop"):
            answer = await who.http.post(f"{LETTERS}/one/{action}", data={"token": token})
            assert answer.status_code == 404


# -- what is done --


async def test_an_operator_sends_a_letter_back_and_removes_one(
    api: Api, box: LetterBox, caplog: pytest.LogCaptureFixture
) -> None:
    who = await person(api, OPERATOR)
    with caplog.at_level(logging.WARNING, "conveyor.http"):
        for letter_id, action in (("one", "redrive"), ("two", "drop")):
            answer = await who.send(f"{LETTERS}/{letter_id}/{action}", page=LETTERS)
            assert (answer.status_code, answer.headers.get("Location")) == (303, LETTERS)
    assert (box.back, list(box.letters)) == (["one"], ["three"])
    lines = [one.__dict__ for one in caplog.records if "operator" in one.message]
    assert [one["message"] for one in lines] == ["an operator acted on a dead letter"] * 2
    assert [(one["action"], one["letter_id"], one["outcome"]) for one in lines] == [
        ("redrive", "one", "done"),
        ("drop", "two", "done"),
    ]
    assert {one["operator"] for one in lines} == {key_hash(OPERATOR)}


async def test_what_cannot_be_done_is_said_in_words(api: Api, box: LetterBox) -> None:
    who = await person(api, OPERATOR)
    box.stuck.add("one")
    stays = await who.send(f"{LETTERS}/one/redrive", page=LETTERS)
    assert (stays.status_code, f"the letter stays: {LOST}" in stays.text) == (409, True)
    for action in ("redrive", "drop"):
        gone = await who.send(f"{LETTERS}/unknown/{action}", page=LETTERS)
        assert (gone.status_code, "no such dead letter" in gone.text) == (404, True)
    assert len(box.letters) == 3


async def test_a_reading_operator_and_a_foreign_form_move_nothing(api: Api, box: LetterBox) -> None:
    reader, operator = await person(api, READER), await person(api, OPERATOR)
    for who, token in ((reader, await reader.token()), (operator, await reader.token())):
        for action in ("redrive", "drop"):
            answer = await who.http.post(f"{LETTERS}/one/{action}", data={"token": token})
            assert answer.status_code == 403
    assert (len(box.letters), box.back) == (3, [])


# -- the service --


async def test_the_service_goes_on_from_a_cursor_whatever_left_meanwhile(box: LetterBox) -> None:
    box.letters.clear()
    for number in range(LETTERS_SHOWN + 2):
        box.put(f"{number:02}")
    letters = OperatorLetters(box, Cursors([b"key"]))
    first = await letters.page(None)
    assert isinstance(first.next_cursor, str)
    await letters.drop(first.letters[-1].letter_id)
    second = await letters.page(first.next_cursor)
    assert [one.letter_id for one in second.letters] == ["30", "31"]
    assert len(first.letters) == LETTERS_SHOWN


@pytest.mark.parametrize(("letter_id", "code"), [("one", "conflict"), ("nine", "not_found")])
async def test_the_service_tells_why_a_letter_did_not_go_back(
    box: LetterBox, letter_id: str, code: str
) -> None:
    box.stuck.add("one")
    with pytest.raises(ConveyorError) as caught:
        await OperatorLetters(box, Cursors([b"key"])).redrive(letter_id)
    assert caught.value.code == code
