"""The direct gateway's reading of URLs, and its requests for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.model import TaskFailure
from conveyor.gateway.targets import Target, parse_target, redirected
from conveyor.ports.gateway import ScrapeFailed


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://h.test", "http://h.test/"),
        ("HTTP://H.Test/A", "http://h.test/A"),
        ("http://h.test?x=1", "http://h.test/?x=1"),
        ("http://h.test/a#b?c", "http://h.test/a"),
        ("https://h.test:443/a", "https://h.test/a"),
        ("https://h.test:80/a", "https://h.test:80/a"),
        ("http://h.test/a/../b/./c//d", "http://h.test/a/../b/./c//d"),
        ("http://h.test/%7e%2F%zz%", "http://h.test/%7e%2F%zz%"),
        ("http://h.test/a|b^c`{d}\"<>'", "http://h.test/a|b^c`{d}\"<>'"),
        ("http://h.test/?a=b+c&d=[e]\\f", "http://h.test/?a=b+c&d=[e]\\f"),
        ("http://h.test\\a\\b?c\\d", "http://h.test/a/b?c\\d"),
        ("  http://h.test/a\tb\n c \r\n", "http://h.test/ab%20c"),
        ("http://h.test/ü?ü=日", "http://h.test/%C3%BC?%C3%BC=%E6%97%A5"),
        ("http://münchen.test/", "http://xn--mnchen-3ya.test/"),
        ("http://r2---sn-x.test/v", "http://r2---sn-x.test/v"),
        ("http://a_b.test/", "http://a_b.test/"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("http://2130706433/", "http://127.0.0.1/"),
        ("http://0177.1/", "http://127.0.0.1/"),
        ("http://127。0。0。1/", "http://127.0.0.1/"),
        ("http://[0:0:0:0:0:0:0:1]:8080/", "http://[::1]:8080/"),
        ("http://user:p%40ss@h.test/a@b", "http://h.test/a@b"),
        ("http:h.test/a", "http://h.test/a"),
    ],
)
def test_what_is_sent(url: str, sent: str) -> None:
    assert parse_target(url).url == sent


def test_credentials_become_basic_authentication() -> None:
    assert parse_target("http://user:p%40ss@h.test/").credentials == "Basic dXNlcjpwQHNz"
    assert parse_target("http://user@h.test/").credentials == "Basic dXNlcjo="
    assert parse_target("http://h.test/").credentials is None


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", "malformed_url"),
        ("h.test", "malformed_url"),
        ("http://", "malformed_url"),
        ("http://[::1/", "malformed_url"),
        ("http://256.1.1.1/", "malformed_url"),
        ("http://h:99999/", "malformed_url"),
        ("http://h test/", "malformed_url"),
        ("http://h.test/\ud800", "malformed_url"),
        ("ftp://h.test/", "unsupported_scheme"),
        ("file:///etc/passwd", "unsupported_scheme"),
        ("javascript:alert(1)", "unsupported_scheme"),
        ("http://a..test/", "impossible_host"),
        ("http://.test/", "impossible_host"),
        (f"http://{'a' * 64}.test/", "impossible_host"),
        (f"http://{'.'.join(['a' * 49] * 6)}/", "impossible_host"),
    ],
)
def test_what_cannot_be_fetched_is_a_bad_target(url: str, code: str) -> None:
    with pytest.raises(ScrapeFailed) as caught:
        parse_target(url)
    assert (caught.value.problem.code, caught.value.failure) == (code, TaskFailure.BAD_TARGET)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "host",
    ["a.test.", f"{'a' * 63}.test", ".".join(["a" * 49] * 5)],
    ids=["root dot", "longest label", "long"],
)
def test_names_at_the_bounds_are_possible(host: str) -> None:
    assert parse_target(f"http://{host}/").host == host


@pytest.mark.parametrize(
    ("location", "sent"),
    [
        ("/x", "http://h.test/x"),
        ("x?y", "http://h.test/a/x?y"),
        ("?y", "http://h.test/a/b?y"),
        ("//i.test/x", "http://i.test/x"),
        ("https://i.test", "https://i.test/"),
        (" /x y ", "http://h.test/x%20y"),
        ("/\udcff\udcc3\udca4", "http://h.test/%FF%C3%A4"),
    ],
)
def test_where_a_redirect_leads(location: str, sent: str) -> None:
    assert redirected(parse_target("http://h.test/a/b?c"), location).url == sent


@given(st.text(max_size=200) | st.text(max_size=200).map("http://".__add__))
def test_no_text_raises_anything_but_a_verdict(text: str) -> None:
    base = parse_target("http://h.test/")
    read: list[Callable[[], Target]] = [lambda: parse_target(text), lambda: redirected(base, text)]
    for attempt in read:
        with suppress(ScrapeFailed):
            url = attempt().url
            assert url.isascii()
            assert url.isprintable()
            assert " " not in url
