"""Checks of many values at once agree with checks of one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, TypeAdapter

from conveyor.domain import ids, strict_json, urls
from conveyor.domain.errors import ConveyorError, InvalidTask
from conveyor.domain.remarks import UnknownFields
from conveyor.domain.submission import parse_task
from conveyor.intake.lines import read_task
from tests.unit.intake_lists import RUN

PROPERTY = settings(database=None, max_examples=500)
ORACLE = TypeAdapter(AnyUrl)

LETTERS = "abnxz019-.:/?#@%A[]{}|^`~!$&'()*+,;=_ \\\"\n\tä\x7f"
LABELS = st.from_regex(r"[a-z0-9-]{1,8}", fullmatch=True) | st.sampled_from(
    ["xn--a", "xn--bcher-kva", "www", "r2---sn", "0x7f", "1", "com", "a" * 70, ""]
)
HOSTS = st.lists(LABELS, min_size=1, max_size=5).map(".".join)
PORTS = st.just("") | st.integers(0, 120_000).map(lambda port: f":{port}") | st.just(":")
TAILS = st.just("") | st.text(LETTERS, max_size=12).map(lambda text: "/" + text)
NEAR_URLS = st.tuples(
    st.sampled_from(["http://", "https://", "ftp://"]),
    HOSTS,
    PORTS,
    TAILS | st.text(LETTERS, max_size=6),
).map("".join)


@pytest.mark.slow
@PROPERTY
@given(url=NEAR_URLS | st.text(LETTERS, max_size=25))
@example(url="https://www.example.com/a?b=c#d")
@example(url="http://a.example:65535")
@example(url="http://a.example:99999/")
@example(url="http://xn--a.example/")
@example(url="http://a.xn--a/")
@example(url="http://1.2.3.4/")
@example(url="http://a.example\n")
@example(url="http://a.example/\nhttp://b.example/")
@example(url="http://a.example/" + "x" * 2_031)
@example(url="http://a.example/" + "x" * 2_032)
def test_what_is_plain_is_good(url: str) -> None:
    if urls.are_plain([url]):
        assert urls.check(url) is None
        assert urls._parse(url) is None
        ORACLE.validate_python(url)
        assert msgspec.json.encode(url) == b'"' + url.encode() + b'"'
        assert len(url) <= urls.MAX_LENGTH


@pytest.mark.slow
@PROPERTY
@given(given=st.lists(NEAR_URLS, max_size=6))
def test_several_are_plain_only_where_each_is(given: list[str]) -> None:
    assert urls.are_plain(given) == all(urls.are_plain([url]) for url in given)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "https://shop-7.example.co.uk/a/b.html?c=d&e=%20#f",
        "https://a.b.example:8443/x",
        "http://9.example/@user:x",
    ],
)
def test_the_usual_urls_are_plain(url: str) -> None:
    assert urls.are_plain([url] * 1_000)


def test_a_url_is_no_two_urls() -> None:
    good = "http://a.example/"
    assert urls.are_plain([good, good])
    assert not urls.are_plain([f"{good}\n{good}"])
    assert not urls.are_plain([good, ""])
    assert urls.are_plain([])


@pytest.mark.slow
@settings(database=None)
@given(
    first=st.integers(0, 5_000) | st.integers(0, ids.MAX_INDEX - 3_000),
    count=st.integers(0, 2_500),
)
@example(first=1_023, count=2)
@example(first=ids.MAX_INDEX, count=1)
@example(first=ids.MAX_INDEX + 1, count=0)
@example(first=2**30 - 1, count=2)
def test_ids_in_a_row_are_the_ids_one_by_one(first: int, count: int) -> None:
    expected = [ids.task_id(RUN, index) for index in range(first, first + count)]
    assert ids.task_ids(RUN, first, count) == expected


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (ids.MAX_INDEX, 2), (0, -1)])
def test_ids_beyond_the_range_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="task indexes out of range"):
        ids.task_ids(RUN, first, count)


FIELDS = st.sampled_from(['"url"', '"external_id"', '"method"', '"u\\u0072l"', '"x"'])
VALUES = st.one_of(
    NEAR_URLS.map(lambda url: f'"{url}"'),
    st.sampled_from(['"sku-1"', '"http://a.example/"', '""', '"a b"', "null", "1", '"POST"', "{}"]),
)
MEMBERS = st.tuples(FIELDS, st.sampled_from([":", ": ", " : "]), VALUES).map("".join)
LINES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["{", "{ ", "{  "]),
    st.lists(MEMBERS, max_size=3).flatmap(
        lambda members: st.sampled_from([", ", ",", " , "]).map(lambda comma: comma.join(members))
    ),
    st.sampled_from(["}", " }", "} ", ",}", ""]),
)


@pytest.mark.slow
@PROPERTY
@given(line=LINES)
@example(line='{"url":"http://a.example/","external_id":"a"}')
@example(line='{"url":"http://a.example/","url":"http://a.example/"}')
@example(line='{"url": "http://a.example/"}')
def test_a_simple_json_task_is_read_as_the_strict_reader_does(line: str) -> None:
    try:
        expected = parse_task(strict_json.decode(line.encode()), 3, {})
    except ConveyorError:
        assert isinstance(read_task(line, 3, {}, UnknownFields(), 1), InvalidTask)
    else:
        assert read_task(line, 3, {}, UnknownFields(), 1) == expected
