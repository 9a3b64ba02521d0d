"""Bodies of tasks as pages show them: any bytes, in any character set, never long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.http.pages.bodies import MOST_SHOWN, charset, fitting, fitting_lines, shown_text
from conveyor.http.pages.routes import PREVIEW_HEADERS
from conveyor.http.pages.session import SessionOptions
from conveyor.service.overview import MOST_PREVIEWED
from conveyor.service.page_schemas import Preview
from tests.unit.http_api import Api, open_api

HTML_BOUND = 120 * 1_024
DEEP = b"[" * 900 + b'"a",' * 14_000 + b"1" + b"]" * 900
LABELS = st.sampled_from(
    [
        "utf-8",
        "utf-7",
        "utf-16",
        "utf-32",
        "punycode",
        "idna",
        "unicode_escape",
        "raw_unicode_escape",
    ]
    + ["iso-8859-1", "windows-1251", "shift_jis", "iso-2022-jp", "gbk", "big5", "euc-kr", "rot13"]
    + ["undefined", "mbcs", "zip", "hz", "x-user-defined", "no-such", "macintosh", "ibm866"]
)
TYPES = st.sampled_from(["text/html", "application/json", "text/plain", "text/xml", "", ";", "a/b"])
NAMED = st.builds("{}; charset={}".format, TYPES, LABELS | st.text(max_size=12))
TEXTS = st.sampled_from(
    [
        b"[" * 40_000,
        DEEP,
        b'"\\"' * 20_000,
        b'{"name":"\\ud83d"}',
        b"+2D0-",
        b"\\ud83d",
        b"<" * 65_536,
    ]
    + [
        b'["' + b"\\" * 60_000,
        b"<meta charset=punycode>a-b-c",
        b"\xff\xfe\x00\xd8",
        b"\xed\xa0\xbd",
    ]
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", sessions=SessionOptions(on_loopback=True)) as opened:
        yield opened


def shown(data: bytes, content_type: str, *, more: int = 0) -> str:
    """Return a body's text."""
    return shown_text(Preview(data, len(data) + more, content_type))


@pytest.mark.slow
@given(data=st.binary(max_size=600) | TEXTS, content_type=TYPES | NAMED, more=st.integers(0, 1))
def test_any_bytes_are_shown_and_never_long(data: bytes, content_type: str, more: int) -> None:
    html, is_whole = fitting_lines(shown(data, content_type, more=more), MOST_SHOWN)
    assert len(html.encode("utf-8")) <= MOST_SHOWN
    assert is_whole or len(data) > 20_000
    label = charset(content_type)
    assert label.isascii()
    assert all(letter.isalnum() or letter in "-_" for letter in label)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=punycode"])
async def test_hostile_bodies_are_a_page_like_others(api: Api, content_type: str) -> None:
    job = await api.submit(6)
    run = job["latest_run"]
    bodies = [DEEP, b'{"name":"\\ud83d"}', b"<" * MOST_PREVIEWED, b'"' * MOST_PREVIEWED]
    bodies += [b"\xed\xa0\xbd", b"+2D0-"]
    for task, body in zip(await api.tasks_of(run["run_id"]), bodies, strict=True):
        await api.succeed(
            job["job_id"], task.run_id, task.task_id, body=body, content_type=content_type
        )
        place = f"/dashboard/jobs/{job['job_id']}/runs/{run['run_id']}/tasks/{task.task_id}"
        for form in ("text", "html"):
            answer = await api.bare.get(f"{place}/preview?as={form}")
            assert answer.status_code == 200
            assert len(answer.content) <= HTML_BOUND
            assert {name: answer.headers[name] for name in PREVIEW_HEADERS} == PREVIEW_HEADERS


def test_deep_json_stays_as_it_came() -> None:
    assert shown(DEEP, "application/json") == DEEP.decode()


def test_an_open_quote_is_read_once() -> None:
    # A pattern that tried each of its quotes anew would take minutes, which the timeout ends.
    body = b'["' + b'\\"' * 32_000
    assert shown(body, "application/json") == body.decode()


def test_the_tokens_of_json_are_those_of_the_body() -> None:
    body = b'{"price": 12.50, "a":1, "a":2, "big":1e400, "id":1.0e5, "l":[1]}'
    lines = [line.strip().rstrip(",") for line in shown(body, "application/json").splitlines()]
    wanted = ['"price": 12.50', '"a": 1', '"a": 2', '"big": 1e400', '"id": 1.0e5']
    assert lines[1:-1] == [*wanted, '"l": [', "1", "]"]


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("<meta charset=iso-8859-1>Grüße".encode("latin-1"), "text/html", "Grüße"),
        ('<?xml version="1.0" encoding="windows-1251"?>Да'.encode("cp1251"), "text/xml", "Да"),
        ("Grüße".encode(), "text/html; charset=unicode_escape", "Grüße"),
        ("Grüße".encode("latin-1"), "text/plain", "Gr\ufffd\ufffde"),
        ("Grüße und viele mehr".encode("latin-1"), "text/plain; charset=iso-8859-1", "Grüße"),
        ("東京".encode("utf-16"), "text/plain", "東京"),
        ("東京".encode("euc_jp"), "text/html; charset=EUC-JP", "東京"),
        (b"a\0b", "text/html", "00000000  61 00 62"),
    ],
)
def test_character_sets_are_those_of_browsers(body: bytes, content_type: str, text: str) -> None:
    if content_type == "text/plain" and body.startswith(b"Gr"):
        body += b" und so weiter, und so fort"
    assert text in shown(body, content_type)


@pytest.mark.parametrize(
    ("content_type", "sent"),
    [
        ("text/html", "text/html"),
        ("text/html; charset=punycode", "text/html"),
        ('text/html; charset="ISO-8859-1"', "text/html; charset=windows-1252"),
        ("text/html;charset=euc_jp", "text/html; charset=euc-jp"),
    ],
)
async def test_a_rendered_page_names_its_own_character_set(
    api: Api, content_type: str, sent: str
) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.succeed(
        job["job_id"], task.run_id, task.task_id, body=b"<p>", content_type=content_type
    )
    place = f"/dashboard/jobs/{job['job_id']}/runs/{task.run_id}/tasks/{task.task_id}"
    answer = await api.bare.get(f"{place}/preview?as=html")
    assert answer.headers["Content-Type"] == sent


@given(text=st.text("<>&\"'aü\u202e", max_size=300), most=st.integers(3, 400))
def test_a_text_is_cut_by_its_length_on_the_page(text: str, most: int) -> None:
    cut = fitting(text, most)
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))
    html, _ = fitting_lines(text, most)
    assert len(html.encode()) <= most
    assert text.startswith(unescape(html))
