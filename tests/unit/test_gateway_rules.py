"""The rules of the fake gateway: what a document says, what a wrong one gets, and who answers."""

from __future__ import annotations

import logging
import os
import tomllib
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import msgspec
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import TaskBody
from conveyor.gateway.fake import page
from conveyor.gateway.ruled import MOST_CALLS, RuledGateway, RulesFile
from conveyor.gateway.rules import GatewayRules, body_reader, rules_of_json, rules_of_toml
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.roles.logs import Repeats
from conveyor.testing.clock import FakeClock

SHOP = "https://shop.example/p/1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gateway(clock: FakeClock, tmp_path: Path) -> RuledGateway:
    return RuledGateway(clock, directory=tmp_path)


async def _scrape(gateway: RuledGateway, url: str, **fields: object) -> Success:
    request = ScrapeRequest(url, "key-of-a-caller", **fields)  # type: ignore[arg-type]
    async with gateway.scrape(request) as success:
        return success


async def _status(gateway: RuledGateway, url: str = SHOP, **fields: object) -> int:
    """Scrape; return the status that was answered."""
    try:
        return (await _scrape(gateway, url, **fields)).status
    except ScrapeFailed as failed:
        return failed.problem.status


def _install(gateway: RuledGateway, text: str) -> None:
    gateway.install(text.encode(), is_toml=True)


async def test_the_first_rule_that_is_for_a_call_answers_it(gateway: RuledGateway) -> None:
    _install(
        gateway,
        """
        rules = [
            {host = "shop.example", path = "/p/*", method = "POST", status = 404},
            {host = "*.EXAMPLE", path = "/p/*", status = 410},
            {host = "other.example:8443", status = 451},
            {host = "other.example", path = "/?", body = "Grüße"},
        ]
        """,
    )
    assert await _status(gateway) == 410
    assert await _status(gateway, method="POST") == 404
    assert await _status(gateway, "https://SHOP.example/p/1?status=500") == 410
    assert await _status(gateway, "https://other.example:8443/") == 451
    assert (await _scrape(gateway, "https://other.example/a")).content == "Grüße".encode()
    plain = "https://shop.example/q"
    assert (await _scrape(gateway, plain)).content == page(plain)
    assert await _status(gateway, f"{plain}?status=503") == 503
    assert [rule.calls for rule in gateway.calls().rules] == [1, 2, 1, 1]


async def test_a_rule_with_an_id_goes_on_where_it_was(gateway: RuledGateway) -> None:
    first = '[[rules]]\nid = "a"\nhost = "shop.example"\nanswers = [{status = 503, times = 2}'
    _install(gateway, first + "]")
    assert await _status(gateway) == 503
    _install(gateway, '[[rules]]\nid = "b"\nhost = "*.org"\n' + first + ", {status = 404}]")
    assert [each.calls for each in gateway.calls().rules] == [0, 1]
    assert [await _status(gateway) for _ in range(3)] == [503, 404, 404]
    _install(gateway, first.replace("503", "502") + "]")
    assert [each.calls for each in gateway.calls().rules] == [0]
    assert await _status(gateway) == 502
    _install(gateway, first.replace('id = "a"\n', "") + "]")
    assert [each.calls for each in gateway.calls().rules] == [0]


async def test_a_known_id_keeps_what_was_counted_of_a_url(gateway: RuledGateway) -> None:
    rule = '[[rules]]\nid = "a"\nhost = "shop.example"\nflaky = 2\n'
    _install(gateway, rule)
    assert await _status(gateway) == 503
    _install(gateway, rule + '[[rules]]\nhost = "*.org"')
    assert [await _status(gateway) for _ in range(2)] == [503, 200]


def test_an_id_stands_once(gateway: RuledGateway) -> None:
    with pytest.raises(ConveyorError, match="another rule has this id"):
        _install(gateway, '[[rules]]\nid = "a"\n[[rules]]\nid = "a"\n')


async def test_answers_come_in_their_order_and_the_last_one_stays(
    gateway: RuledGateway, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_bytes(b"<p>stored\xff")
    _install(
        gateway,
        """
        [[rules]]
        host = "shop.example"
        answers = [{status = 503, times = 2}, {status = 429, retry_after = "7"},
                   {body_file = "page.html", type = "text/plain"}]
        """,
    )
    assert [await _status(gateway) for _ in range(3)] == [503, 503, 429]
    for _ in range(3):
        answer = await _scrape(gateway, SHOP)
        assert answer.content == b"<p>stored\xff"
        assert answer.content_type == "text/plain; charset=utf-8"


@pytest.mark.parametrize(("size", "told"), [(500, ""), (501, "may have 1,000 bytes")])
def test_files_of_bodies_are_bounded_together(
    gateway: RuledGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, told: str
) -> None:
    monkeypatch.setattr("conveyor.gateway.rules.MOST_BODIES", 1_000)
    (tmp_path / "a.html").write_bytes(b"a" * 500)
    (tmp_path / "b.html").write_bytes(b"b" * size)
    text = '[[rules]]\nbody_file = "a.html"\n[[rules]]\nbody_file = "b.html"\n'
    if not told:
        _install(gateway, text)
        return
    with pytest.raises(ConveyorError, match=told):
        _install(gateway, text)


async def test_a_share_and_a_latency_depend_on_the_seed(
    gateway: RuledGateway, clock: FakeClock
) -> None:
    rule = (
        'rules = [{share = 0.3, status = 404, latency = {median = "200ms", spread = 0.5}}]\n'
        "seed = SEED"
    )
    urls = [f"https://shop.example/{number}" for number in range(1_000)]
    failed: list[list[str]] = []
    for seed in ("1", "1", "2"):
        _install(gateway, rule.replace("SEED", seed))
        failed.append([url for url in urls if await _status_moving(gateway, clock, url) == 404])
    assert failed[0] == failed[1] != failed[2]
    assert all(240 < len(some) < 360 for some in failed)


async def _status_moving(gateway: RuledGateway, clock: FakeClock, url: str) -> int:
    statuses: list[int] = []

    async def run() -> None:
        statuses.append(await _status(gateway, url))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await clock.advance(60)
    return statuses[0]


async def test_a_call_longer_than_its_timeout_fails(
    gateway: RuledGateway, clock: FakeClock
) -> None:
    _install(gateway, "rules = [{latency = {median = 30}}]")
    codes: list[str] = []

    async def run() -> None:
        with pytest.raises(ScrapeFailed) as caught:
            await _scrape(gateway, SHOP, timeout=5.0)
        codes.append(caught.value.problem.code)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await clock.advance(5)
    assert codes == ["timeout"]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("[[rules]\n", 1, "is not TOML"),
        ('\n[[rules]]\nhots = "a"', 3, "rules[0].hots: is none of account"),
        ("rule = [{status = 200}]", 1, "rule: is none of redact, rules, seed"),
        ("[[rules]]\nstatus = 200\n[[rules]]\n# status\nstatus = 99\n", 5, "rules[1].status"),
        ("[[rules]]\nanswers = [{status = 200},\n{status = 600}]", 3, "answers[1].status"),
        ("[[rules]]\nanswers = []", 2, "needs one"),
        ("[[rules]]\nanswers = [{times = 0}]", 2, "times: takes a whole number from 1"),
        ("[[rules]]\nstatus = 200\nanswers = [{}]", 2, "rules[0].status: is none of"),
        ("[[rules]]\nshare = 1.5", 2, "share: takes a number from 0 to 1"),
        ("[[rules]]\nshare = nan", 2, "share: takes a number"),
        ("[[rules]]\nlatency = {spread = 1}", 2, "needs a median"),
        ("[[rules]]\nlatency = {median = -1}", 2, "median: takes 0 seconds to a day"),
        ("[[rules]]\nlatency = {median = 1, spread = 9}", 2, "spread: takes a number from 0 to 3"),
        ("[[rules]]\nhang = 2", 2, "hang: takes true or false"),
        ("[[rules]]\ndelay = true", 2, "delay: takes seconds"),
        ('[[rules]]\nbody = "a"\nsize = 4', 3, "size: body gives the body already"),
        ('[[rules]]\nhost = ""', 2, "host: takes a text"),
        ('[[rules]]\nmethod = "GET POST"', 2, "method: takes a method"),
        ('[[rules]]\nbody_file = "../secret"', 2, "is outside of the directory"),
        ('[[rules]]\nbody_file = "/etc/passwd"', 2, "is outside of the directory"),
        ('[[rules]]\nbody_file = "link"', 2, "is outside of the directory"),
        ('[[rules]]\nbody_file = "gone.html"', 2, "is no file"),
        ('[[rules]]\nbody_file = "pipe"', 2, "is no file"),
        ('[[rules]]\nbody_file = "circle"', 2, "body_file: "),
        (f"[[rules]]\nstatus = 0x{'f' * 4_000}", 2, "status: takes a status"),
        (f"[[rules]]\nbody = 0x{'f' * 4_000}", 2, "body: takes a number of at most"),
        ('[redact]\nheader = ["a"]', 2, "redact.header: is none of headers, query"),
        ('[redact]\nheaders = ["a", 5]', 2, "redact.headers[1]: takes a text"),
        ("seed = -1", 1, "seed: takes a whole number"),
        ("# seed = -1\n\n'seed'=-1", 3, "seed: takes a whole number"),
        ('redact.headers = [\n"seed = 5",\n[[], {}],\n]\n', 3, "redact.headers[1]: takes a text"),
        (
            "[[rules]]\nbody = '''\n[[rules]]\nstatus = 1\n'''\n[[rules]]\n"
            "[[rules.answers]]\n[[rules.answers]]\nstatus = 99",
            9,
            "rules[1].answers[1].status",
        ),
        ("rules = [\n{share = 1, answers = [{}, {}]},\n{share = 2}]", 3, "rules[1].share"),
    ],
)
def test_a_wrong_document_is_told_with_its_line_and_word(
    tmp_path: Path, text: str, line: int, told: str
) -> None:
    directory = tmp_path / "rules"
    directory.mkdir()
    (tmp_path / "secret").write_text("secret")
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "circle").symlink_to("circle")
    os.mkfifo(directory / "pipe")
    with pytest.raises(ConveyorError) as caught:
        rules_of_toml(text, "gateway.toml", body_reader(directory))
    detail = caught.value.detail
    assert detail.startswith(f"gateway.toml, line {line}: "), detail
    assert told in detail
    assert "\n" not in detail


def test_the_line_of_a_wrong_word_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    loads = tomllib.loads

    def count(text: str) -> dict[str, object]:
        read.append(text)
        return loads(text)

    monkeypatch.setattr(tomllib, "loads", count)
    text = "[[rules]]\nstatus = 200\n" * 900 + "[[rules]]\nstatus = 99"
    with pytest.raises(ConveyorError, match=r"line 1802: rules\[900\].status: "):
        rules_of_toml(text, "gateway.toml", body_reader(None))
    assert read == [text]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (b"[]", "send an object"),
        (b"{", "is not JSON"),
        (b'{"rules": [{"status": "x"}]}', "rules[0].status: takes a status"),
        (b'{"rules": [{"body_file": "a.html"}]}', "needs a file of rules"),
        (b'{"rules": [5]}', "rules[0]: takes a table"),
        (b'{"rules": [{"share": 1e999}]}', ""),
    ],
)
def test_a_wrong_document_in_json_is_told_with_its_word(document: bytes, told: str) -> None:
    with pytest.raises(ConveyorError) as caught:
        rules_of_json(document, body_reader(None))
    assert told in caught.value.detail


def test_names_to_redact_are_read() -> None:
    rules = rules_of_toml('[redact]\nheaders = ["X-Shop"]\n', "f", body_reader(None))
    assert rules.redact.match("x-shop")


async def test_calls_are_listed_without_secrets_and_bounded(gateway: RuledGateway) -> None:
    _install(gateway, '[[rules]]\nstatus = 200\n[redact]\nquery = ["shop"]')
    query = "shop=planted-1&api_key=planted-2&page=3&k=key-of-a-caller"
    url = f"https://user:hunter2@shop.example/p?{query}"
    headers = '{"Authorization": "Bearer planted-3", "X-Page": "4"}'
    body = TaskBody(
        content='{"password": "planted-4", "name": "5"}', content_type="application/json"
    )
    params = {"custom_headers": headers, "js_render": "true", "token": "planted-5"}
    await _scrape(gateway, url, params=params, body=body, method="POST")
    calls = gateway.calls()
    shown = msgspec.json.encode(calls).decode()
    for secret in ("planted", "hunter2", "key-of-a-caller"):
        assert secret not in shown
    [call] = calls.requests
    assert (call.number, call.method, call.rule) == (1, "POST", 0)
    assert "page=3" in call.url
    assert call.headers["X-Page"] == "4"
    assert call.params["js_render"] == "true"
    assert '"name": "5"' in (call.body or "")
    for number in range(MOST_CALLS + 5):
        await _scrape(gateway, f"https://shop.example/{number}")
    calls = gateway.calls()
    assert calls.total == MOST_CALLS + 6
    assert len(calls.requests) == MOST_CALLS
    assert calls.requests[-1].number == calls.total
    assert calls.hosts == {"shop.example:443": calls.total}
    gateway.forget()
    assert gateway.calls().total == 0
    assert not gateway.calls().rules  # those of the start, which has none


FORM = """--b\r
Content-Disposition: form-data; name="name"\r
\r
Maria\r
--b\r
Content-Disposition: form-data; name="password"\r
Content-Type: text/plain\r
\r
planted-1\r
with two lines\r
--b\r
Content-Disposition: form-data; filename="name"; Name=api_key\r
\r
planted-2\r
--b--\r
"""


def _nested(text: str, times: int) -> str:
    for _ in range(times):
        text = quote(text, safe="")
    return text


_JSON, _TEXT = "application/json", "text/plain"
SHOWN: list[dict[str, Any]] = [
    {"url": "https://h.example/?next=" + _nested("https://x.example/?token=planted-1", 1)},
    {"url": "https://h.example/?next=" + _nested("https://me:planted-1@x.example/", 2)},
    {"url": "https://h.example/planted-1?token=planted-1"},
    {"url": "https://h.example/?state=1&code=planted-1"},
    {"url": "https://h.example/?q=" + _nested('{"password":"planted-1"}', 1)},
    {"params": {"js_instructions": '[{"fill":["#password","planted-1"]}]'}},
    {"params": {"x": '{"password": "planted-1"}'}},
    {
        "url": "https://h.example/planted-1",
        "params": {"custom_headers": '{"Authorization": "Bearer planted-1"}'},
    },
    {"url": "https://h.example/" + b64encode(b"planted-1 is a key").decode(), "key": "planted-1"},
    {"body": TaskBody('{"tokens": ["planted-1"]}', _JSON)},
    {"body": TaskBody('{"credentials": {"value": "planted-1"}}', _JSON)},
    {"body": TaskBody('{"pass\\u0077ord": "planted-1"}', _JSON)},
    {"body": TaskBody('{"data": "{\\"password\\": \\"planted-1\\"}"}', _JSON)},
    {"body": TaskBody('{"next": "https:\\/\\/me:planted-1@x.example"}', _JSON)},
    {"body": TaskBody("<a><password><![CDATA[planted-1]]></password></a>", "text/xml")},
    {"body": TaskBody("a=" + _nested('{"pin": "planted-1"}', 1), "x-www-form-urlencoded")},
    {"body": TaskBody("grant_type=authorization_code&code=planted-1", "")},
    {"body": TaskBody(FORM, _TEXT)},
    {"body": TaskBody(FORM.replace("with two", "--not the end"), "multipart/form-data")},
    {"body": TaskBody(FORM.replace('name="pass', 'name = "pass'), "multipart/form-data")},
]


@pytest.mark.parametrize("number", range(len(SHOWN)))
async def test_a_listed_call_shows_no_secret_wherever_it_stands(
    gateway: RuledGateway, number: int
) -> None:
    call = {"url": "https://h.example/", "method": "POST", **SHOWN[number]}
    key = call.pop("key", "key-of-a-caller")
    with suppress(ScrapeFailed):
        async with gateway.scrape(ScrapeRequest(call.pop("url"), key, **call)):
            pass
    shown = msgspec.json.encode(gateway.calls().requests[-1]).decode()
    assert "planted" not in shown
    assert b64encode(b"planted")[:8].decode() not in shown
    assert "end" not in shown
    assert "sha256:" in shown


async def test_a_listed_call_shows_all_else_as_it_was_sent(gateway: RuledGateway) -> None:
    body = TaskBody('{"b": 1,  "note": "https://x.example/?page=2", "a": ["x"]}', _JSON)
    headers = '{"X-Shop": "berlin", "Authorization": "Basic bWFyaWE6c2VzYW1lLTc3"}'
    url = "https://maria:sesame-77@h.example/maria/berlin?a=1&b=%7B%22x%22:1%7D"
    await _scrape(gateway, url, params={"custom_headers": headers}, body=body, method="POST")
    call = gateway.calls().requests[-1]
    assert call.body == body.content
    assert call.headers["X-Shop"] == "berlin"
    assert call.url.partition("@")[2] == url.partition("@")[2]


async def test_secrets_of_a_form_in_parts_are_digests(gateway: RuledGateway) -> None:
    for content in (FORM, FORM.partition("\r\nwith")[0]):  # also one that was cut
        body = TaskBody(content, 'multipart/form-data; boundary="b"')
        await _scrape(gateway, "https://shop.example/", body=body, method="POST")
        shown = gateway.calls().requests[-1].body or ""
        assert "planted" not in shown
        assert "with two lines" not in shown
        assert "sha256:" in shown
        assert "Maria" in shown


async def test_a_changed_file_is_followed_and_a_wrong_one_told_once(
    gateway: RuledGateway, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("rules = [{status = 404}]")
    file = RulesFile(path, gateway)
    file.start()
    assert await _status(gateway) == 404
    with caplog.at_level(logging.ERROR, logger="conveyor.gateway"):
        for number in range(20):
            path.write_text("\n" * number + f"word_{number} = 1")
            for _ in range(2):
                await _look(file, clock)
            assert await _status(gateway) == 404
        path.unlink()
        await _look(file, clock)
        told = [record.getMessage() for record in caplog.records]
        path.write_text("rules = [{status = 410}]")
        await _look(file, clock)
    assert await _status(gateway) == 410
    assert len(told) == 21
    for number, line in enumerate(told[:20]):
        assert line.startswith(f"{path}, line {number + 1}: word_{number}: is none of")
    assert "cannot be read" in told[-1]


async def test_each_change_to_a_wrong_file_is_told_though_the_line_be_the_same(
    gateway: RuledGateway, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[[rules]]\nbody = 'x'")
    file = RulesFile(path, gateway)
    file.start()
    caplog.handler.addFilter(repeats := Repeats())
    try:
        for status in ("99", "100", "1000"):
            path.write_text(f"[[rules]]\nstatus = {status}")
            await _look(file, clock)
    finally:
        caplog.handler.removeFilter(repeats)
    assert [text.count("takes a status from 200") for text in caplog.messages] == [1, 1, 1]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_file_that_is_none_is_refused_and_not_waited_for(
    make: Callable[[Path], None], gateway: RuledGateway, tmp_path: Path
) -> None:
    make(path := tmp_path / "gateway.toml")
    with pytest.raises(ConveyorError, match="gateway.toml: is no regular file"):
        RulesFile(path, gateway).start()


async def test_a_file_that_cannot_be_read_for_an_unforeseen_reason_leaves_the_rules(
    gateway: RuledGateway,
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("rules = [{status = 404}]")
    file = RulesFile(path, gateway)
    file.start()

    def fail(self: RulesFile) -> GatewayRules:
        raise ArithmeticError("no such number")

    path.write_text("rules = [{status = 410}]\n")
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "conveyor.gateway"):
        patch.setattr(RulesFile, "read", fail)
        await _look(file, clock)
    assert await _status(gateway) == 404
    [record] = caplog.records
    assert "ArithmeticError: no such number" in record.getMessage()


async def _look(file: RulesFile, clock: FakeClock) -> None:
    """Let the file be looked at once, and read if it has changed."""
    async with anyio.create_task_group() as group:
        group.start_soon(file.follow_change, clock)
        await clock.advance(1)


async def test_a_file_that_still_changes_is_not_read(
    gateway: RuledGateway, clock: FakeClock, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("rules = [{status = 404}]")
    file = RulesFile(path, gateway)
    file.start()
    path.write_text("rules = []")
    async with anyio.create_task_group() as group:
        group.start_soon(file.follow_change, clock)
        await clock.advance(0.01)
        path.write_text("rules = [{status = 410}]\n")
        await clock.advance(1)
    assert await _status(gateway) == 404
    await _look(file, clock)
    assert await _status(gateway) == 410
