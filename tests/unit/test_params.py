"""Scraper params: known keys, canonical text, implied format."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain import params
from conveyor.domain.errors import InvalidTaskReason as Reason
from conveyor.domain.model import Format
from conveyor.domain.text_rules import Refused

PROPERTY = settings(database=None)
ORDINARY = {
    "js_render": True,
    "wait": 5000,
    "wait_for": ".price > b",
    "proxy_country": "us",
    "session_id": 12345,
    "block_resources": "image,media",
    "allowed_status_codes": "404,500",
    "css_extractor": '{"title": "h1"}',
    "outputs": "emails,links",
    "js_instructions": '[{"click": "#go"},\n {"wait": 500}]',
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def refusal(raw: object) -> tuple[Reason, str | None]:
    with pytest.raises(Refused) as caught:
        params.normalize(raw)
    return caught.value.reason, caught.value.value


def test_every_known_key_takes_an_ordinary_value() -> None:
    rest = {"mode": "auto", "custom_headers": {}, "response_type": "pdf", "extract": True}
    switches = dict.fromkeys(params.SWITCHES, False)
    normalized = params.normalize({**ORDINARY, **rest, **switches})
    assert normalized.keys() == params.KNOWN.keys()
    assert all(isinstance(value, str) for value in normalized.values())


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (5, "5"), (-7, "-7"), (5.0, "5.0"), (1.25, "1.25")],
)
def test_scalars_become_their_json_text(value: object, text: str) -> None:
    assert params.normalize({"session_id": value}) == {"session_id": text}


def test_text_stays_as_it_is() -> None:
    assert params.normalize({"wait_for": " Ünïcode\n'\" "}) == {"wait_for": " Ünïcode\n'\" "}


@pytest.mark.parametrize("value", [None, [], ["a"], {}, {"a": "b"}])
def test_other_values_are_refused_with_their_key(value: object) -> None:
    assert refusal({"wait_for": value}) == (Reason.INVALID_PARAM_VALUE, "wait_for")


def test_absent_and_empty() -> None:
    assert params.normalize(None) == {}
    assert params.normalize({}) == {}


@pytest.mark.parametrize("raw", [[], "a", 1, True])
def test_params_that_are_no_object(raw: object) -> None:
    assert refusal(raw) == (Reason.INVALID_PARAM_VALUE, "zenrows_params")


@pytest.mark.parametrize("key", ["url", "apikey", "screenshot", "JS_RENDER", "", "js_render "])
def test_unknown_keys_are_named(key: str) -> None:
    assert refusal({"wait": 1, key: "x"}) == (Reason.UNKNOWN_PARAM, key)


def test_a_long_unknown_key_is_shortened_and_escaped() -> None:
    reason, value = refusal({"a\n" + "b" * 500: 1})
    assert reason is Reason.UNKNOWN_PARAM
    assert value is not None
    assert value.startswith("a\\nbbb")
    assert len(value) == 120


@pytest.mark.parametrize("key", sorted(params.SWITCHES))
def test_switches(key: str) -> None:
    for on in (True, 1, 1.0, "1", "true", "True", "TRUE"):
        assert params.normalize({key: on}) == {key: "true"}
    for off in (False, 0, 0.0, "0", "false", "False"):
        assert params.normalize({key: off}) == {key: "false"}
    refused: object
    for refused in (2, -1, 0.5, "yes", "on", "", " true", "01", "١", None, [], {}):
        assert refusal({key: refused}) == (Reason.INVALID_PARAM_VALUE, key)


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("mode", ["auto"], ["AUTO", "manual", "", True]),
        (
            "response_type",
            ["markdown", "plaintext", "pdf", "PDF", "html", "HTML"],
            ["png", "", "markdown\n", "mar\u212adown"],
        ),
        ("wait", [0, 30_000, "5000", 500.0], [30_001, -1, 0.5, "", "5s", "5\n", "٥", True]),
    ],
)
def test_values_the_contract_bounds(key: str, allowed: list[object], refused: list[object]) -> None:
    for value in allowed:
        params.normalize({key: value})
    for value in refused:
        assert refusal({key: value}) == (Reason.INVALID_PARAM_VALUE, key)


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        ({"Referer": "https://a/"}, '{"Referer":"https://a/"}'),
        ('{ "Referer" : "https:\\/\\/a\\/" }', '{"Referer":"https://a/"}'),
        ({"X-Count": 5, "X-On": True}, '{"X-Count":"5","X-On":"true"}'),
        ({"X-Name": "Zoë\tA"}, '{"X-Name":"Zoë\\tA"}'),
        ({"!#$%&'*+-.^_`|~09": ""}, '{"!#$%&\'*+-.^_`|~09":""}'),
        ({}, "{}"),
        ("{}", "{}"),
    ],
)
def test_custom_headers_are_canonical(raw: object, stored: str) -> None:
    assert params.normalize({"custom_headers": raw}) == {"custom_headers": stored}
    assert params.normalize({"custom_headers": stored}) == {"custom_headers": stored}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        True,
        5,
        [],
        "",
        "true",
        "[]",
        "{",
        '{"a": "1", "a": "2"}',
        '{"a": {"b": "c"}}',
        '{"a": "\ud800"}',
        {"a": None},
        {"a": []},
        {"": "x"},
        {"a b": "x"},
        {"a:": "x"},
        {"ä": "x"},
        {"a\n": "x"},
        {"a": "x\r\nInjected: y"},
        {"a": "x\n"},
        {"a": "\x00"},
        {"a": "\x7f"},
        {f"h{number}": "x" for number in range(33)},
        {"a": "x" * 8_192},
    ],
)
def test_custom_headers_refused(raw: object) -> None:
    assert refusal({"custom_headers": raw}) == (Reason.INVALID_PARAM_VALUE, "custom_headers")


def test_the_bounds_of_custom_headers() -> None:
    params.normalize({"custom_headers": {f"h{number}": "x" for number in range(32)}})
    room = 8_192 - len('{"a":""}')
    params.normalize({"custom_headers": {"a": "x" * room}})
    assert refusal({"custom_headers": {"a": "x" * (room + 1)}})[1] == "custom_headers"
    assert refusal({"custom_headers": {"a": "é" * (room // 2 + 1)}})[1] == "custom_headers"


def test_the_bound_of_all_params() -> None:
    room = 32_768 - len('{"wait_for":""}')
    params.normalize({"wait_for": "x" * room})
    assert refusal({"wait_for": "x" * (room + 1)}) == (Reason.INVALID_PARAM_VALUE, "zenrows_params")


@pytest.mark.slow
@PROPERTY
@given(raw=st.dictionaries(st.sampled_from(sorted(params.KNOWN)), JSON_VALUES))
def test_normal_form_is_text_and_stable(raw: dict[str, Any]) -> None:
    try:
        normalized = params.normalize(raw)
    except Refused:
        reason, key = refusal(raw)
        assert reason is Reason.INVALID_PARAM_VALUE
        assert key in raw
        return
    assert normalized.keys() == raw.keys()
    assert all(isinstance(value, str) for value in normalized.values())
    assert params.normalize(normalized) == normalized


def test_the_task_wins_key_by_key() -> None:
    job = {"wait": "1", "custom_headers": '{"A":"1"}'}
    task = {"custom_headers": '{"B":"2"}'}
    assert params.merge(job, task) == {"wait": "1", "custom_headers": '{"B":"2"}'}
    assert params.merge(job, None) == job
    assert job == {"wait": "1", "custom_headers": '{"A":"1"}'}


@pytest.mark.parametrize(
    ("given_params", "expected"),
    [
        ({}, Format.HTML),
        ({"response_type": "markdown", "autoparse": "true"}, Format.MARKDOWN),
        ({"response_type": "plaintext", "css_extractor": "{}"}, Format.PLAINTEXT),
        ({"response_type": "pdf", "json_response": "true"}, Format.PDF),
        ({"response_type": "PDF"}, Format.PDF),
        ({"response_type": "html"}, Format.HTML),
        ({"response_type": "HTML", "autoparse": "true"}, Format.JSON),
        ({"autoparse": "true"}, Format.JSON),
        ({"autoparse": "True"}, Format.JSON),
        ({"autoparse": "false"}, Format.HTML),
        ({"json_response": "true"}, Format.JSON),
        ({"json_response": "false"}, Format.HTML),
        ({"css_extractor": '{"a":"b"}'}, Format.JSON),
        ({"css_extractor": ""}, Format.HTML),
        ({"extract": "true"}, Format.JSON),
        ({"extract": "false"}, Format.HTML),
        ({"js_render": "true"}, Format.HTML),
    ],
)
def test_implied_format(given_params: dict[str, str], expected: Format) -> None:
    assert params.implied_format(given_params) is expected


@pytest.mark.parametrize("key", ["js_render", "premium_proxy"])
def test_mode_excludes_what_it_chooses_itself(key: str) -> None:
    params.check_combination({"mode": "auto", key: "false"})
    params.check_combination({key: "true"})
    with pytest.raises(Refused) as caught:
        params.check_combination({"mode": "auto", key: "True"})
    assert (caught.value.reason, caught.value.value) == (Reason.INVALID_PARAM_VALUE, key)


@pytest.mark.parametrize(
    ("merged", "key"),
    [
        ({}, None),
        ({"js_render": "false", "json_response": "false", "js_instructions": ""}, None),
        ({"premium_proxy": "true", "autoparse": "true"}, None),
        ({"js_render": "TRUE"}, "js_render"),
        ({"json_response": "true"}, "json_response"),
        ({"js_instructions": "[]"}, "js_instructions"),
    ],
)
def test_conflict_with_post(merged: dict[str, str], key: str | None) -> None:
    assert params.conflict_with_post(merged) == key
