"""Target URLs: pydantic's AnyUrl is the oracle."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, TypeAdapter, ValidationError

from conveyor.domain import urls
from conveyor.domain.errors import InvalidTaskReason as Reason

PROPERTY = settings(database=None, max_examples=400)
ORACLE = TypeAdapter(AnyUrl)

LABELS = st.one_of(
    st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True),
    st.sampled_from(["", "xn--", "xn--a", "xn--bcher-kva", "r2---sn-x", "a" * 64, "%41", "%zz"]),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=5),
)
NUMBERS = st.integers(0, 2**33).map(str) | st.integers(0, 2**33).map(hex)
HOSTS = st.one_of(
    st.lists(LABELS, min_size=1, max_size=4).map(".".join),
    st.lists(NUMBERS, min_size=1, max_size=5).map(".".join),
    st.text("0123456789abcdef:.[]%", max_size=12).map(lambda text: f"[{text}]"),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
)
PORTS = st.just("") | st.integers(-1, 70_000).map(lambda port: f":{port}") | st.just(":")
USERS = st.sampled_from(["", "u@", "u:p@", ":@", "@", "a@b:c@", "%40:%2f@"])
TAILS = st.one_of(
    st.sampled_from(["", "/", "/a b", "/%zz", "/é?ü=1#ö", "?q", "#f", "/a\\b", "//x", "/[x]{y}|z"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10).map(lambda text: "/" + text),
)
SCHEMES = st.sampled_from(["http://", "https://", "HTTP://", "hTtPs://"])
URLS = st.tuples(SCHEMES, USERS, HOSTS, PORTS, TAILS).map("".join)


def oracle_accepts(url: str) -> bool:
    try:
        ORACLE.validate_python(url)
    except ValidationError:
        return False
    return True


def stricter_rule(url: str) -> bool:
    """Return whether one of the rules that are stricter than the oracle applies."""
    control = any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in url)
    authority = url.partition("://")[2]
    return control or url != url.strip() or not authority or authority[0] in "/\\?#"


@pytest.mark.slow
@PROPERTY
@given(url=URLS)
@example(url="http://a..b/")
@example(url="http://a\\@b/")
def test_it_agrees_with_the_oracle(url: str) -> None:
    accepted = urls.check(url) is None
    assert accepted == (oracle_accepts(url) and not stricter_rule(url))


@pytest.mark.slow
@PROPERTY
@given(url=st.text(max_size=30) | st.text("htps:/\\?#@[]. \t\n", max_size=14))
def test_nothing_is_accepted_that_the_oracle_refuses(url: str) -> None:
    if urls.check(url) is None:
        assert oracle_accepts(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://a",
        "HTTPS://Example.COM/Path",
        "http://a..b/",
        "http://../",
        f"http://{'a' * 64}.com/",
        "https://r2---sn-x.example.com/",
        "http://bücher.example/straße?q=ä#ö",
        "http://xn--bcher-kva.example/",
        "http://a/%zz%",
        "http://user:secret@a/",
        "http://user@:80@a/",
        "http://a:65535/",
        "http://a:/",
        "http://[::1]:80/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://a/b c",
        "http://a?q",
        "http://a/" + "x" * 2_039,
    ],
)
def test_accepted(url: str) -> None:
    assert urls.check(url) is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", Reason.MALFORMED_URL),
        ("example.com/x", Reason.MALFORMED_URL),
        ("//example.com/x", Reason.MALFORMED_URL),
        ("/x", Reason.MALFORMED_URL),
        ("://a", Reason.MALFORMED_URL),
        ("http", Reason.MALFORMED_URL),
        ("http://256.1.1.1/", Reason.MALFORMED_URL),
        ("http://h:99999/", Reason.MALFORMED_URL),
        ("http://[::1/", Reason.MALFORMED_URL),
        ("http://[::g]/", Reason.MALFORMED_URL),
        ("http://a b/", Reason.MALFORMED_URL),
        ("http://%zz/", Reason.MALFORMED_URL),
        ("http://xn--a/", Reason.MALFORMED_URL),
        ("https://9ab.xn--auk", Reason.MALFORMED_URL),
        ("http://a.xn--aab##", Reason.MALFORMED_URL),
        ("http://b-.xn--auk", Reason.MALFORMED_URL),
        (" http://a/", Reason.MALFORMED_URL),
        ("http://a/ ", Reason.MALFORMED_URL),
        ("http://a/\n", Reason.MALFORMED_URL),
        ("http://a/\tb", Reason.MALFORMED_URL),
        ("ht\ntp://a/", Reason.MALFORMED_URL),
        ("http://a/\x00", Reason.MALFORMED_URL),
        ("http://a/\x7f", Reason.MALFORMED_URL),
        ("http://a/\x85b", Reason.MALFORMED_URL),
        ("http://a/\u2003", Reason.MALFORMED_URL),
        ("http://a/\ud800", Reason.MALFORMED_URL),
        ("ftp://a/", Reason.UNSUPPORTED_SCHEME),
        ("file:///etc/passwd", Reason.UNSUPPORTED_SCHEME),
        ("javascript:alert(1)", Reason.UNSUPPORTED_SCHEME),
        ("data:text/html,x", Reason.UNSUPPORTED_SCHEME),
        ("httpss://a/", Reason.UNSUPPORTED_SCHEME),
        ("view-source:http://a/", Reason.UNSUPPORTED_SCHEME),
        ("localhost:9000/x", Reason.UNSUPPORTED_SCHEME),
        ("http:", Reason.MISSING_HOST),
        ("http://", Reason.MISSING_HOST),
        ("http:///x", Reason.MISSING_HOST),
        ("http:////x", Reason.MISSING_HOST),
        ("http:/x", Reason.MISSING_HOST),
        ("http:x", Reason.MISSING_HOST),
        ("http:\\\\x\\y", Reason.MISSING_HOST),
        ("http://?q", Reason.MISSING_HOST),
        ("https://#f", Reason.MISSING_HOST),
        ("http://user@/x", Reason.MISSING_HOST),
        ("http://a/" + "x" * 2_040, Reason.URL_TOO_LONG),
        ("ftp://" + "x" * 3_000, Reason.URL_TOO_LONG),
    ],
)
def test_refused(url: str, reason: Reason) -> None:
    assert urls.check(url) is reason


def test_the_length_is_counted_in_characters() -> None:
    assert urls.check("http://a/" + "ü" * 2_039) is None
    assert urls.check("http://a/" + "ü" * 2_040) is Reason.URL_TOO_LONG
