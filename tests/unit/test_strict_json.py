"""One JSON document, strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode

PROPERTY = settings(database=None)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SCALARS_ON_THE_WIRE = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
DOCUMENTS = st.recursive(
    SCALARS_ON_THE_WIRE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refusal(body: bytes, *, max_depth: int = 32) -> str:
    with pytest.raises(ConveyorError) as caught:
        strict_json.decode(body, max_depth=max_depth)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert len(caught.value.detail) < 300
    return caught.value.detail


@pytest.mark.slow
@PROPERTY
@given(document=DOCUMENTS, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_whatever_json_writes_is_read_back(
    document: object, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    assert strict_json.decode(text.encode()) == document


@PROPERTY
@given(body=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        value = strict_json.decode(body)
    except ConveyorError:
        refusal(body)
    else:
        assert value == json.loads(body)


@PROPERTY
@given(text=st.text(alphabet='[]{}",:\\u1a0dDcCfF8. ntrue', max_size=40))
def test_what_is_accepted_is_what_json_reads(text: str) -> None:
    try:
        value = strict_json.decode(text.encode())
    except ConveyorError:
        return
    assert value == json.loads(text)


def depth_of(document: object) -> int:
    if isinstance(document, dict):
        return 1 + max(map(depth_of, document.values()), default=0)
    if isinstance(document, list):
        return 1 + max(map(depth_of, document), default=0)
    return 0


TRICKY_TEXT = st.text(alphabet='[]{}"\\/:,a\n', max_size=6)
TRICKY_DOCUMENTS = st.recursive(
    TRICKY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY_TEXT, inner, max_size=3),
    max_leaves=12,
)


@PROPERTY
@given(document=TRICKY_DOCUMENTS, max_depth=st.integers(0, 4))
def test_depth_is_counted_outside_strings_alone(document: object, max_depth: int) -> None:
    body = json.dumps(document).encode()
    if depth_of(document) > max_depth:
        assert f"more than {max_depth} levels deep at line 1" in refusal(body, max_depth=max_depth)
    else:
        assert strict_json.decode(body, max_depth=max_depth) == document


ESCAPES = [r"\ud83d", r"\ude00", r"\uD800", r"\udfff", r"\\\\", r"\"", r"\u0041", "u", "d800"]


@PROPERTY
@given(text=st.lists(st.sampled_from(ESCAPES), max_size=8).map("".join))
def test_surrogates_are_refused_exactly_where_no_text_holds_them(text: str) -> None:
    body = f'"{text}"'.encode()
    value = json.loads(body)
    try:
        value.encode()
    except UnicodeEncodeError:
        assert "surrogate" in refusal(body)
    else:
        assert strict_json.decode(body) == value


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 at byte 1"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8 at byte 8"),
        (b'{"a": 1} x', "Extra data at line 1 column 10"),
        (b"{}{}", "Extra data at line 1 column 3"),
        (b'{"a": 1,}', "line 1 column"),
        (b'{\n"a" 1}', "line 2 column 5"),
        (b"{'a': 1}", "line 1 column 2"),
        (b'["a\nb"]', "Invalid control character at line 1 column 4"),
        (b"[01]", "line 1 column 3"),
        (b"nul", "Expecting value at line 1 column 1"),
        (b"[1, 2", "line 1 column"),
        (b'"\\x"', "line 1 column"),
    ],
)
def test_a_refusal_says_where(body: bytes, expected: str) -> None:
    assert expected in refusal(body)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"a": 1, "a": 2}', '"a"'),
        (b'{"x": [{"deep": 1, "b": 0, "deep": 1}]}', '"deep"'),
        (b'{"\\u0061": 1, "a": 2}', '"a"'),
        (b'{"a\\nb": 1, "a\\nb": 2}', '"a\\nb"'),
    ],
)
def test_duplicate_keys_are_refused_by_name(body: bytes, key: str) -> None:
    assert f"the key {key} twice" in refusal(body)


def test_the_same_key_in_two_objects_is_fine() -> None:
    assert strict_json.decode(b'[{"a": 1}, {"a": 2}]') == [{"a": 1}, {"a": 2}]


def test_a_refusal_does_not_repeat_a_long_key() -> None:
    key = b'"' + b"k" * 10_000 + b'"'
    assert "k" * 200 not in refusal(b"{" + key + b":1," + key + b":2}")


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json_are_refused(name: str) -> None:
    assert name in refusal(f'{{"a": {name}}}'.encode())
    assert strict_json.decode(f'"{name}"'.encode()) == name


@pytest.mark.parametrize("number", ["1e309", "-1e309", "1" + "0" * 308, "-" + "9" * 5_000])
def test_numbers_that_no_double_holds_are_refused(number: str) -> None:
    assert "too large" in refusal(f"[{number}]".encode())


@pytest.mark.parametrize("number", ["1e308", "-1e308", "9" * 308, "18446744073709551616", "1e-999"])
def test_large_numbers_that_a_double_holds_are_read(number: str) -> None:
    assert strict_json.decode(number.encode()) == json.loads(number)


@pytest.mark.parametrize(
    "text",
    [
        r'"\ud800"',
        r'"\uDFFF"',
        r'"\ud83d\u0041"',
        r'"\ud83dA"',
        r'"\ude00\ud83d"',
        r'"\ud83d\ud83d\ude00"',
        r'"\ud83d\ude00\ude00"',
        r'{"\ud800": 1}',
        r'"\\\ud800"',
    ],
)
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    assert "surrogate pair at byte" in refusal(text.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\uD83D\uDE00\ud83d\ude00"', "\U0001f600\U0001f600"),
        (r'"\\ud800"', r"\ud800"),
        (r'"\\\\ud800"', r"\\ud800"),
        (r'"\ud7ff\ue000"', "\ud7ff\ue000"),
    ],
)
def test_whole_pairs_and_escaped_backslashes_are_read(text: str, expected: str) -> None:
    assert strict_json.decode(text.encode()) == expected


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_counted_exactly(opening: bytes, closing: bytes) -> None:
    strict_json.decode(opening * 32 + b"1" + closing * 32)
    assert "more than 32 levels" in refusal(opening * 33 + b"1" + closing * 33)
    strict_json.decode(opening * 3 + b"1" + closing * 3, max_depth=3)
    assert "more than 2 levels" in refusal(opening * 3 + b"1" + closing * 3, max_depth=2)


def test_siblings_do_not_add_to_the_depth() -> None:
    body = b"[" + b",".join([b'{"a": [[]]}'] * 5_000) + b"]"
    value = strict_json.decode(body, max_depth=4)
    assert isinstance(value, list)
    assert len(value) == 5_000


@pytest.mark.parametrize(
    "text", ["[" * 100, "]" * 100, '{"a": [' * 40, '\\"[' * 50, "\\" * 7, '"[{' * 40, ""]
)
def test_brackets_in_strings_and_keys_do_not_count(text: str) -> None:
    document = {text: [text, {"b": text + '"'}]}
    assert strict_json.decode(json.dumps(document).encode(), max_depth=3) == document


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'[{"a":', b"[[]", b'"\\', b'["', b"]"])
def test_a_million_levels_are_refused_without_recursion(unit: bytes) -> None:
    refusal(unit * (1_000_000 // len(unit)))


def test_the_place_of_too_deep_nesting_is_named_where_it_is_near() -> None:
    assert "line 2 column 3" in refusal(b'["]]]",\n [[1]]]', max_depth=2)
    far = b'["' + b"x" * 100_000 + b'", [[1]]]'
    assert refusal(far, max_depth=2).endswith("2 levels deep")


def test_a_scalar_has_no_depth() -> None:
    assert strict_json.decode(b"5", max_depth=0) == 5
    refusal(b"[]", max_depth=0)


@pytest.mark.slow
def test_a_document_of_too_many_containers_is_refused_before_it_is_read() -> None:
    assert strict_json.decode(b"[" + b"[]," * 999_998 + b"[]]") is not None
    with pytest.raises(ConveyorError, match="more than 2,000,000 objects and lists"):
        strict_json.decode(b"[" + b"{}," * 2_000_000 + b"{}]")


@pytest.mark.parametrize(
    ("body", "place"), [(b'"\\ud800"', 2), (b'["\\\\", "\\udc00x"]', 9), ('"é\\udfff"'.encode(), 4)]
)
def test_half_a_surrogate_pair_is_told_by_its_byte_counted_from_one(
    body: bytes, place: int
) -> None:
    assert refusal(body).endswith(f"surrogate pair at byte {place}")


@pytest.mark.slow
def test_two_million_objects_and_lists_are_the_most() -> None:
    """They are counted before a document is read, so what holds so many may be no document."""
    assert refusal(b"[]" * 1_000_000 + b"{}" * 1_000_000 + b"[").endswith(
        "holds more than 2,000,000 objects and lists"
    )
    assert "2,000,000" not in refusal(b"[]" * 2_000_000)
