"""Secrets are taken out of requests, and found again in answers."""

from __future__ import annotations

import html
import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from conveyor.domain.model import TaskBody
from conveyor.gateway.redaction import Redacted, SecretNames, SecretScanner, redacted
from conveyor.ports.gateway import ScrapeRequest

KEY = "k-5f0c9a77e1d24b"
SECRET = 'p"ß/<w>&7 é\\x'
PAGE = "https://shop.example/p/1"


def asked(url: str = PAGE, key: str = KEY, **fields: Any) -> ScrapeRequest:
    return ScrapeRequest(url, key, **fields)


def percent_twice(text: str) -> str:
    return quote(quote(text, safe=""), safe="")


def by_numbers(text: str) -> str:
    return "".join(f"&#x{ord(character):X};" for character in text)


ENCODINGS: list[Callable[[str], str | bytes]] = [
    str,
    lambda text: quote(text, safe=""),
    lambda text: quote(text, safe="").lower(),
    lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    percent_twice,
    lambda text: b64encode(text.encode()),
    lambda text: urlsafe_b64encode(b"x" + text.encode() + b"yz"),
    lambda text: b64encode(b"xy" + text.encode() + b"z"),
    lambda text: quote(b64encode(text.encode()), safe=""),
    lambda text: text.encode().hex(),
    lambda text: text.encode().hex().upper(),
    json.dumps,
    lambda text: json.dumps(text, ensure_ascii=False),
    lambda text: json.dumps(json.dumps(text)),
    lambda text: json.dumps(text).replace("/", "\\/"),
    html.escape,
    by_numbers,
    lambda text: html.escape(json.dumps(text)),
    lambda text: text.encode("utf-16-le"),
    lambda text: b64encode(b64encode(text.encode())),
    lambda text: urlsafe_b64encode(b"a" + b64encode(b"b" + text.encode())),
    lambda text: b64encode(text.encode()).hex(),
    lambda text: text.encode().hex().encode().hex(),
    lambda text: "0" + text.encode().hex().encode().hex(),
    lambda text: b64encode(text.encode().hex().encode()),
    lambda text: b64encode(quote(text, safe="").encode()),
    lambda text: b64encode(json.dumps(text).encode()),
    lambda text: b64encode(by_numbers(text).encode()),
    lambda text: encodebytes(b64encode(b"before" * 20 + text.encode())),
    lambda text: quote(b64encode(b64encode(text.encode())), safe=""),
]


@pytest.mark.parametrize("number", range(len(ENCODINGS)))
@pytest.mark.parametrize("step", [1, 7, 4_096])
def test_a_secret_is_found_in_every_encoding_and_across_pieces(number: int, step: int) -> None:
    spelt = ENCODINGS[number](SECRET)
    data = spelt if isinstance(spelt, bytes) else spelt.encode()
    page = b"<p>" + b"before " * 50 + data + b" after" * 50
    scanner = SecretScanner([SECRET])
    pieces = [page[start : start + step] for start in range(0, len(page), step)]
    assert any(scanner.feed(piece) for piece in pieces)
    other = SecretScanner(["another secret"])
    assert not any(other.feed(piece) for piece in pieces)


@pytest.mark.parametrize("levels", [1, 4, 5, 8])
def test_a_secret_is_taken_out_of_documents_within_documents(levels: int) -> None:
    def found(secret: str, page: int = 2) -> Redacted:
        text = json.dumps({"password": secret, "page": page})
        for _ in range(levels):
            text = json.dumps({"inner": text, "also": [text]})
        return redacted(asked(method="POST", body=TaskBody(text, "application/json")))

    assert found("planted-1").asked == found("planted-2").asked
    assert found("planted-1").asked != found("planted-1", page=3).asked
    assert "planted-1" in found("planted-1").secrets


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked(key="k-0000aaaabbbb"), asked()),
        (asked("https://u:first-pw@shop.example/"), asked("https://v:second@shop.example/")),
        (asked(PAGE + "?api_key=first1&page=2"), asked(PAGE + "?api_key=other2&page=2")),
        (asked(PAGE + "?%61pi_key=first1"), asked(PAGE + "?%61pi_key=other2")),
        (asked(PAGE + "?a=1;token=first1;b"), asked(PAGE + "?a=1;token=other2;c")),
        (asked(PAGE + "#access_token=first1"), asked(PAGE + "#access_token=other2")),
        (asked(PAGE + ";jsessionid=first1"), asked(PAGE + ";jsessionid=other2")),
        (
            asked(PAGE + "?to=https%3A%2F%2Fx%3Afirst1%40a.example"),
            asked(PAGE + "?to=https%3A%2F%2Fy%3Aother2%40a.example"),
        ),
        (
            asked(params={"custom_headers": '{"X-One": "first1", "Cookie": "s=1"}'}),
            asked(params={"custom_headers": '{"cookie": "s=2", "x-one": "other2"}'}),
        ),
        (asked(PAGE + f"/{KEY}"), asked(PAGE + "/k-0000aaaabbbb", key="k-0000aaaabbbb")),
        (
            asked(method="POST", body=TaskBody('{"a": {"password": "x1y2"}}', "application/json")),
            asked(method="POST", body=TaskBody('{"a":{"password":"z3"}}', "application/json")),
        ),
        (
            asked(body=TaskBody("pin=1&token=a1b2c3", "application/x-www-form-urlencoded")),
            asked(body=TaskBody("pin=22&token=zz", "application/x-www-form-urlencoded")),
        ),
    ],
)
def test_requests_that_differ_in_secrets_alone_have_one_key(
    one: ScrapeRequest, other: ScrapeRequest
) -> None:
    assert redacted(one).asked == redacted(other).asked


@pytest.mark.parametrize(
    "other",
    [
        asked(PAGE + "?page=2"),
        asked(PAGE + "?keyword=shoes"),
        asked(method="POST"),
        asked(params={"js_render": "true"}),
        asked(params={"custom_headers": '{"X-One": "v"}'}),
        asked(body=TaskBody("x", "text/plain")),
        asked("http://shop.example/p/1"),
    ],
)
def test_requests_that_differ_otherwise_have_another_key(other: ScrapeRequest) -> None:
    assert redacted(other).asked.key != redacted(asked()).asked.key


@pytest.mark.parametrize(
    "name",
    [
        "subscription-key",
        "session_key",
        "encryptionKey",
        "admin_key",
        "commonkey",
        "PHPSESSID",
        "connect.sid",
        "x-session",
        "user_pass",
        "dbpass",
        "db_pwd",
        "key[0]",
        "auth[0]",
        "csrf",
        "creds",
        "login_pin",
        "otp_code",
        "apiKey2",
        "accessKeyId",
    ],
)
def test_values_of_names_like_those_of_keys_are_secret(name: str) -> None:
    found = redacted(asked(f"{PAGE}?{quote(name)}=a1b2c3d4&page=2"))
    assert found.asked.url == f"{PAGE}?{quote(name)}=***&page=2"
    assert "a1b2c3d4" in found.secrets


@pytest.mark.parametrize(
    "name",
    [
        "monkey",
        "roast_turkey",
        "compass",
        "goods_id",
        "newsId",
        "author",
        "passenger",
        "keyword",
        "code",
    ],
)
def test_values_of_other_names_stay(name: str) -> None:
    assert redacted(asked(f"{PAGE}?{name}=a1b2c3d4")).asked.url == f"{PAGE}?{name}=a1b2c3d4"


def test_the_code_of_a_sign_in_is_secret() -> None:
    assert "a1b2c3d4" in redacted(asked(f"{PAGE}?code=a1b2c3d4&state=x")).secrets


@pytest.mark.parametrize(
    "url",
    [
        PAGE + "?next=/cb?token={}",
        PAGE + "?next=%2Fcb%3Ftoken%3D{}",
        PAGE + "?next=%252Fcb%253Ftoken%253D{}",
        PAGE + "?next=a%3Db%26token%3D{}",
        PAGE + "?next=%2F%2Fuser:{}%40h.example",
        PAGE + "#/r?sig={}",
        PAGE + "/https://user:{}@other.example/x",
        PAGE + "/https%3A%2F%2Fuser%3A{}%40other.example/x",
        PAGE + "/token={}/x",
        PAGE + "?variables=%7B%22token%22%3A%22{}%22%7D",
        PAGE + '?variables={{"a":[{{"token":{{"value":"{}"}}}}]}}',
    ],
)
def test_values_within_values_of_a_url_are_redacted(url: str) -> None:
    one, other = (redacted(asked(url.format(value))) for value in ("first-one", "other-two"))
    assert one.asked == other.asked
    assert "first-one" not in one.asked.url
    assert "first-one" in one.secrets


@pytest.mark.parametrize(
    "value",
    [
        '[{{"click":"#go"}},{{"fill":["#password","{}"]}}]',
        '{{"token":"{}"}}',
        "/cb?token={}",
        "user=1&token={}",
    ],
)
def test_values_within_params_are_redacted(value: str) -> None:
    one, other = (
        redacted(asked(params={"js_instructions": value.format(text)}))
        for text in ("first-one", "other-two")
    )
    assert one.asked == other.asked
    assert "first-one" in one.secrets


def test_what_is_typed_elsewhere_is_masked_and_not_looked_for() -> None:
    typed = redacted(asked(params={"js_instructions": '[{"fill":["#search","shoes"]}]'}))
    assert typed.asked.params["js_instructions"] == '[{"fill": ["#search", "***"]}]'
    assert "shoes" not in typed.secrets


@pytest.mark.parametrize(
    "url", [PAGE + "/a%20b/c%2Fd?x=%7B1%7D&y=[2]&z=a%3Db#top", "/p?q=%5B%22a%22%5D&r=1:2"]
)
def test_a_url_without_secrets_stays_as_it_is(url: str) -> None:
    assert redacted(asked(url)).asked.url == url


MULTIPART = '--b\r\nContent-Disposition: form-data; name="password"\r\n\r\n{}\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (MULTIPART, "multipart/form-data; boundary=b"),
        (MULTIPART.replace("; name", '; filename="name"; Name'), "multipart/form-data"),
        ('{{"tokens":["{}"]}}', "application/json"),
        ('{{"password":{{"value":"{}"}}}}', "application/json"),
        ('{{"token":"{}","token":"same-one"}}', "application/json"),
        ('{{"a":1}}\n{{"token":"{}"}}\n', "application/x-ndjson"),
        ('{{"token":"{}"', "application/json"),
        ('{{"token":"{}"}}', "text/plain"),
        ("<a><Password type='x'>{}</Password></a>", "application/xml"),
        ("<a><password><![CDATA[{}]]></password></a>", "text/xml"),
        ('<login user="me" password="{}"/>', "application/soap+xml"),
        ("a=1&token={}", ""),
    ],
)
def test_values_of_everything_that_is_posted_are_redacted(body: str, content_type: str) -> None:
    one, other = (
        redacted(asked(body=TaskBody(body.format(value), content_type)))
        for value in ("first-one", "other-two")
    )
    assert "first-one" in one.secrets
    assert one.asked == other.asked


def in_parts(head: str, value: str) -> str:
    return f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n--b--\r\n"


DOCUMENT = json.dumps({"password": "first-one"})
WITHIN: dict[str, tuple[str, str]] = {
    "JSON in JSON": (json.dumps({"data": DOCUMENT}), "application/json"),
    "JSON in a text of JSON": (json.dumps({"a": json.dumps([DOCUMENT])}), "application/json"),
    "a URL in JSON": ('{"next": "https://x.example/?token=first-one"}', "application/json"),
    "a user in JSON": ('{"next": "https:\\/\\/me:first-one@x.example"}', "application/json"),
    "a URL in a text": ("see <https://x.example/?token=first-one> now", "text/plain"),
    "a URL in a list": ('{"next": ["see https://me:first-one@x.example/ now"]}', ""),
    "markup in JSON": (json.dumps({"a": "<a><pin>first-one</pin></a>"}), "application/json"),
    "JSON in markup": (f"<a><p>{html.escape(DOCUMENT)}</p></a>", "text/xml"),
    "JSON in a form": (urlencode({"a": DOCUMENT}), "application/x-www-form-urlencoded"),
    "a form under the type of JSON": (urlencode({"a": DOCUMENT}), "application/json"),
    "a form in JSON": (json.dumps({"a": urlencode({"b": DOCUMENT})}), "application/json"),
    "parts in JSON": (json.dumps({"a": in_parts('name="pin"', "first-one")}), "application/json"),
    "JSON in a part": (in_parts('name="data"', DOCUMENT), "multipart/form-data; boundary=b"),
    "a form in a part": (in_parts('name="x"', "a=1&pin=first-one"), "multipart/form-data"),
    "a part by its look": (in_parts('name="password"', "first-one"), "text/plain"),
    "a part with spaces": (in_parts('name = "password"', "first-one"), "multipart/form-data"),
    "a part with a star": (in_parts("name*=UTF-8''password", "first-one"), "multipart/form-data"),
}


@pytest.mark.parametrize("place", WITHIN)
def test_what_is_posted_is_redacted_within_what_it_stands_in(place: str) -> None:
    body, content_type = WITHIN[place]
    one, other = (
        redacted(asked(body=TaskBody(body.replace("first-one", value), content_type)))
        for value in ("first-one", "other-two")
    )
    assert one.scanner().feed(b"you sent first-one to us")
    assert one.asked == other.asked


def test_a_line_that_begins_like_a_boundary_is_part_of_a_value() -> None:
    body = TaskBody(in_parts('name="pin"', "first\r\n--one"), "multipart/form-data; boundary=b")
    assert "first\r\n--one" in redacted(asked(body=body)).secrets


def test_a_secret_within_another_header_is_looked_for() -> None:
    headers = json.dumps({"Referer": "https://x.example/?token=first-one"})
    assert "first-one" in redacted(asked(params={"custom_headers": headers})).secrets


def test_a_document_without_secrets_keeps_its_key() -> None:
    text = '{"b": "see https://x.example/?page=1 and a=b", "a": ["<p>x</p>", "{\\"y\\":1}"]}'
    taken = redacted(asked(body=TaskBody(text, "application/json")))
    assert taken.secrets == (KEY,)
    assert taken.asked == taken.plain


def test_names_of_ones_own_are_redacted_too() -> None:
    names = SecretNames(query=("Kunde",))
    one, other = (asked(f"{PAGE}?kunde={value}") for value in ("first1", "other2"))
    assert redacted(one, names).asked == redacted(other, names).asked
    assert redacted(one).asked != redacted(other).asked
    assert "first1" in redacted(one, names).secrets


def test_nothing_of_a_redacted_request_holds_a_secret_in_an_odd_encoding() -> None:
    packed = b64encode(KEY.encode()).decode()
    shown = redacted(asked(f"{PAGE}/{packed}", params={"note": KEY.encode().hex()})).asked
    assert shown.url == "***"
    assert shown.params == {"note": "***"}


def test_credentials_are_looked_for_in_their_parts() -> None:
    pair = b64encode(b"maria:sesame-77").decode()
    headers = json.dumps({"Authorization": f"Basic {pair}", "Cookie": "a=1; sid=abcd-9876"})
    secrets = redacted(asked(params={"custom_headers": headers})).secrets
    assert {"sesame-77", "maria", pair, "abcd-9876"} <= set(secrets)


@pytest.mark.parametrize(
    "value", ["text/html", "application/json; charset=utf-8", "de-DE,de;q=0.9,en;q=0.8", "no-cache"]
)
def test_usual_values_of_headers_do_not_keep_pages_out(value: str) -> None:
    headers = json.dumps({"Accept": value})
    assert redacted(asked(key="local", params={"custom_headers": headers})).secrets == ()
