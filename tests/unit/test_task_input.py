"""One task as a caller sends it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain import text_rules
from conveyor.domain.errors import InvalidTask
from conveyor.domain.errors import InvalidTaskReason as Reason
from conveyor.domain.model import TaskBody, TaskSpec
from conveyor.domain.submission import parse_task

PROPERTY = settings(database=None)
URL = "https://example.com/a"


def accepted(job_params: dict[str, str] | None = None, **fields: object) -> TaskSpec:
    spec = parse_task({"url": URL, **fields}, 0, job_params or {})
    assert isinstance(spec, TaskSpec), spec
    return spec


def refused(
    job_params: dict[str, str] | None = None, **fields: object
) -> tuple[Reason, str | None]:
    invalid = parse_task({"url": URL, **fields}, 7, job_params or {})
    assert isinstance(invalid, InvalidTask), invalid
    assert invalid.index == 7
    return invalid.reason, invalid.value


def test_a_url_alone() -> None:
    assert accepted() == TaskSpec(URL)


def test_every_field() -> None:
    spec = accepted(
        external_id="sku-1",
        metadata={"a": "b"},
        method="post",
        body={"q": ["ü", 1, True, None]},
        zenrows_params={"premium_proxy": True},
    )
    assert spec == TaskSpec(
        URL,
        "sku-1",
        {"a": "b"},
        "POST",
        TaskBody('{"q":["ü",1,true,null]}', "application/json"),
        {"premium_proxy": "true"},
    )


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    nothing = dict.fromkeys(["external_id", "metadata", "method", "body", "zenrows_params"])
    assert accepted(**nothing, priority=9, task_id="x") == TaskSpec(URL)
    assert accepted(metadata={}, zenrows_params={}) == TaskSpec(URL)


@pytest.mark.parametrize("url", ["HTTP://ÉXAMPLE.com:80/ü%20 x#f", "http://u:p@a/", "http://a..b"])
def test_the_url_is_kept_exactly(url: str) -> None:
    assert accepted(url=url).url == url


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (None, "null"),
        ([], "array"),
        ("http://a/", "http://a/"),
        ("http://u:p@a/", "http://***@a/"),
        (5, "5"),
        (True, "true"),
        (1.5, "1.5"),
    ],
)
def test_what_is_no_object(raw: object, value: str) -> None:
    expected = InvalidTask(3, Reason.MALFORMED_URL, value, detail="a task must be an object")
    assert parse_task(raw, 3, {}) == expected


@pytest.mark.parametrize(
    ("url", "value"), [(5, "5"), (None, "null"), ({"secret": 1}, "object"), (False, "false")]
)
def test_a_url_that_is_no_text(url: object, value: str) -> None:
    assert refused(url=url) == (Reason.MALFORMED_URL, value)


def test_a_missing_url() -> None:
    assert parse_task({"external_id": "a"}, 2, {}) == InvalidTask(2, Reason.MALFORMED_URL)


@pytest.mark.parametrize(
    ("url", "reason", "value"),
    [
        ("ftp://user:secret@a/x", Reason.UNSUPPORTED_SCHEME, "ftp://***@a/x"),
        ("http://user:secret@256.1.1.1/", Reason.MALFORMED_URL, "http://***@256.1.1.1/"),
        ("http://user:sec/ret@a/", Reason.MALFORMED_URL, "***@a/"),
        ("user:secret@a/", Reason.UNSUPPORTED_SCHEME, "***@a/"),
        (" http://user:secret@a/", Reason.MALFORMED_URL, "***@a/"),
        ("http://a/\x1b[31m\n", Reason.MALFORMED_URL, "http://a/\\x1b[31m\\n"),
        ("gopher://a/@x", Reason.UNSUPPORTED_SCHEME, "gopher://a/@x"),
    ],
)
def test_a_refused_url_is_shown_without_secrets(url: str, reason: Reason, value: str) -> None:
    assert refused(url=url) == (reason, value)


def test_a_long_url_is_shown_shortened_and_still_without_secrets() -> None:
    reason, value = refused(url="http://user:" + "s" * 3_000 + "@example.com/")
    assert (reason, value) == (Reason.URL_TOO_LONG, "http://***@example.com/")
    _, shown = refused(url="http://a/" + "\n" * 3_000)
    assert shown is not None
    assert len(shown) == 120


@pytest.mark.parametrize("external_id", ["a", "A-z_0.9", "x" * 128])
def test_external_ids(external_id: str) -> None:
    assert accepted(external_id=external_id).external_id == external_id


@pytest.mark.parametrize(
    ("external_id", "value"),
    [
        ("", ""),
        ("a\n", "a\\n"),
        ("a b", "a b"),
        ("ä", "ä"),
        ("a/b", "a/b"),
        ("x" * 129, "x" * 119 + "…"),
        (5, "5"),
        (True, "true"),
        (["a"], "array"),
    ],
)
def test_external_ids_refused(external_id: object, value: str) -> None:
    assert refused(external_id=external_id) == (Reason.INVALID_EXTERNAL_ID, value)


def test_the_bounds_of_metadata() -> None:
    accepted(metadata={f"k{number}": "v" for number in range(20)})
    accepted(metadata={"k" * 128: "ü" * 1_024, " ": "", "👩‍👩‍👧": "line\nfeed"})
    too_many = {f"k{number}": "v" for number in range(21)}
    assert refused(metadata=too_many) == (Reason.METADATA_TOO_LARGE, "21 keys")
    assert refused(metadata={"k": "v" * 1_025}) == (Reason.METADATA_TOO_LARGE, "k")


@pytest.mark.parametrize(
    ("metadata", "reason", "value"),
    [
        ({"": "v"}, Reason.METADATA_KEY_INVALID, ""),
        ({"k" * 129: "v"}, Reason.METADATA_KEY_INVALID, "k" * 119 + "…"),
        ({"a\nb": "v"}, Reason.METADATA_KEY_INVALID, "a\\nb"),
        ({"k": 5}, Reason.METADATA_KEY_INVALID, "metadata.k"),
        ({"k": None}, Reason.METADATA_KEY_INVALID, "metadata.k"),
        ({"k": {"a": "b"}}, Reason.METADATA_KEY_INVALID, "metadata.k"),
        ([], Reason.METADATA_KEY_INVALID, "metadata"),
        ("k", Reason.METADATA_KEY_INVALID, "metadata"),
    ],
)
def test_metadata_refused(metadata: object, reason: Reason, value: str) -> None:
    assert refused(metadata=metadata) == (reason, value)


@pytest.mark.parametrize(
    ("method", "value"),
    [("PUT", "PUT"), ("", ""), ("GET ", "GET "), ("PO\nST", "PO\\nST"), (5, "5"), ([], "array")],
)
def test_methods_refused(method: object, value: str) -> None:
    assert refused(method=method) == (Reason.UNSUPPORTED_METHOD, value)


@pytest.mark.parametrize("method", ["GET", "get", "gEt"])
def test_methods_in_any_case(method: str) -> None:
    assert accepted(method=method) == TaskSpec(URL)


@pytest.mark.parametrize(
    ("body", "content", "content_type"),
    [
        ("a=1&b=ü\n", "a=1&b=ü\n", "application/x-www-form-urlencoded"),
        ("", "", "application/x-www-form-urlencoded"),
        ("x" * 16_384, "x" * 16_384, "application/x-www-form-urlencoded"),
        ({}, "{}", "application/json"),
        ([1, "a"], '[1,"a"]', "application/json"),
        (5, "5", "application/json"),
        (0, "0", "application/json"),
        (False, "false", "application/json"),
        (1.5, "1.5", "application/json"),
    ],
)
def test_bodies(body: object, content: str, content_type: str) -> None:
    assert accepted(method="POST", body=body).body == TaskBody(content, content_type)


def test_a_post_without_body() -> None:
    assert accepted(method="POST") == TaskSpec(URL, method="POST")


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize("body", [float("nan"), float("inf"), "\ud800", ["\ud800"], {"a": {1}}])
def test_bodies_that_json_cannot_hold(body: object) -> None:
    assert refused(method="POST", body=body) == (Reason.BODY_MALFORMED, None)


def test_a_body_nested_beyond_recursion() -> None:
    assert refused(method="POST", body=deep()) == (Reason.BODY_MALFORMED, None)


@pytest.mark.parametrize(
    ("body", "size"), [("x" * 16_385, 16_385), ("ü" * 8_193, 16_386), (["x" * 16_381], 16_385)]
)
def test_a_body_is_bounded_in_bytes_and_never_repeated(body: object, size: int) -> None:
    assert refused(method="POST", body=body) == (Reason.BODY_TOO_LARGE, f"{size} bytes")


@pytest.mark.parametrize("body", ["secret", {}, 0, False])
def test_a_body_needs_post(body: object) -> None:
    assert refused(body=body) == (Reason.BODY_NOT_ALLOWED, "GET")


@pytest.mark.parametrize(
    ("raw", "reason", "value"),
    [
        ({"nope": "secret"}, Reason.UNKNOWN_PARAM, "nope"),
        ({"wait": "secret"}, Reason.INVALID_PARAM_VALUE, "wait"),
        ({"wait": None}, Reason.INVALID_PARAM_VALUE, "wait"),
        ([], Reason.INVALID_PARAM_VALUE, "zenrows_params"),
    ],
)
def test_params_refused_show_the_key_alone(raw: object, reason: Reason, value: str) -> None:
    assert refused(zenrows_params=raw) == (reason, value)


@pytest.mark.parametrize("key", ["js_render", "json_response"])
def test_a_post_conflicts_with_merged_params(key: str) -> None:
    job = {key: "true"}
    conflict = (Reason.METHOD_PARAM_CONFLICT, key)
    assert refused(job, method="POST") == conflict
    assert refused(method="post", zenrows_params={key: True}) == conflict
    accepted(job, method="POST", zenrows_params={key: False})
    accepted(job, method="GET")


def test_a_post_conflicts_with_js_instructions() -> None:
    job = {"js_instructions": "[]"}
    assert refused(job, method="POST") == (Reason.METHOD_PARAM_CONFLICT, "js_instructions")


def test_mode_of_the_job_excludes_switches_of_the_task() -> None:
    job = {"mode": "auto"}
    assert refused(job, zenrows_params={"js_render": True}) == (
        Reason.INVALID_PARAM_VALUE,
        "js_render",
    )
    accepted(job, zenrows_params={"js_render": False})


def test_a_task_is_bounded_as_a_whole() -> None:
    smile = "\U0001f600"
    wide = {smile * 100 + str(number): smile * 1_024 for number in range(20)}
    heavy = {"wait_for": "x" * 32_000}
    accepted(metadata=wide)
    reason, value = refused(method="POST", metadata=wide, zenrows_params=heavy, body="y" * 16_000)
    assert reason is Reason.METADATA_TOO_LARGE
    assert value is not None
    assert value.startswith("a task of 13")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
FIELDS = ["url", "external_id", "metadata", "method", "body", "zenrows_params"]


@pytest.mark.slow
@PROPERTY
@given(
    raw=JSON_VALUES
    | st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES).map(lambda raw: {"url": URL} | raw)
)
def test_any_json_is_a_task_or_a_reason(raw: object) -> None:
    parsed = parse_task(raw, 1, {})
    if isinstance(parsed, InvalidTask):
        assert parsed.value is None or (len(parsed.value) <= 120 and parsed.value.isprintable())
        json.dumps(parsed.value, ensure_ascii=False).encode()
    else:
        assert isinstance(raw, dict)
        assert parsed.url == raw["url"]


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("http://a/", "http://a/"),
        ("https://a/@me?x=b@c", "https://a/@me?x=b@c"),
        ("https://a:80/@me", "https://a:80/@me"),
        ("http://[::1]:80/@me", "http://[::1]:80/@me"),
        ("http://u@a/", "http://***@a/"),
        ("http://u:p@a:80/x@y", "http://***@a:80/x@y"),
        ("http://u:p@[::1]/", "http://***@[::1]/"),
        ("http://u@v:p@a", "http://***@a"),
        ("http://u:p/q@a/", "***@a/"),
        ("http:u:p@a", "***@a"),
        ("ht\ntp://u:p@a", "***@a"),
        ("u:p@a", "***@a"),
    ],
)
def test_masking_credentials(url: str, masked: str) -> None:
    assert text_rules.mask_credentials(url) == masked


def test_masking_takes_linear_work() -> None:
    for text in ("http://" + ":" * 500_000 + "@", "@" * 500_000, "http://" + "@:" * 250_000):
        assert text_rules.mask_credentials(text).startswith(("***@", "http://***@"))


def test_shortening_keeps_what_fits() -> None:
    assert text_rules.shorten("x" * 120) == "x" * 120
    assert text_rules.shorten("x" * 121) == "x" * 119 + "…"
    assert text_rules.shorten("\n" * 100) == "\\n" * 59 + "\\…"
