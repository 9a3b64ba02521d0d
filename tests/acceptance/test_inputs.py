"""URLs and tasks are taken exactly as they are or refused with a reason; no worker dies of one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from zenrows.batch.models import Problem

from tests.acceptance.support_bindings import FLEET, Serving
from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller, Json, problem_of
from tests.acceptance.support_site import Page, Site, serving_site

GOOD = "http://good.invalid/"
NOBODY = "http://127.0.0.1:9"
fetches = pytest.mark.development_only("the gateway of a fleet under test fetches nothing")


@pytest.fixture(scope="module")
def server(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    if binding == FLEET:
        yield request.getfixturevalue("shared_fleet")
        return
    directory = tmp_path_factory.mktemp("inputs")
    flags = ("--gateway", "direct", "--allow-private", "--log-level", "warning")
    # Long enough for a busy machine, and not so long that names nobody answers for take minutes.
    patience = 5 if resolver_is_slow() else 60
    with boot(
        directory, *flags, retry_base=0.01, retry_cap=0.02, gateway_timeout=patience
    ) as server:
        yield server
        assert b"Traceback" not in server.output()


@pytest.fixture
def caller(server: Serving) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving_site() as site:
        yield site


LONGEST = GOOD + "x" * (2_048 - len(GOOD))
ODD_URLS = [
    "http://bücher.invalid/straße?größe=ü#ß",
    "http://xn--bcher-kva.invalid/",
    "http://日本語。invalid/表",
    "http://r2---sn-x.invalid/videoplayback?id=1",
    "http://-dash-.invalid/",
    "http://under_score.invalid/",
    "http://a..b.invalid/",
    "http://.invalid/",
    f"http://{'a' * 64}.invalid/",
    f"http://{'.'.join(['a' * 60] * 5)}.invalid/",
    "http://user:pass%20word@auth.invalid/x",
    "http://user@auth.invalid/",
    "http://:@auth.invalid/",
    "HTTP://UPPER.INVALID/Path",
    "http://host.invalid",
    "http://host.invalid?query",
    "http://host.invalid#fragment",
    "http://host.invalid:65535/",
    "http://host.invalid:/",
    "http://host.invalid./",
    "http://host.invalid/a b c",
    "http://host.invalid/%zz%%00%ff",
    "http://host.invalid/a/../b/./c//d",
    "http://host.invalid\\back\\slash",
    "http://host.invalid/\U0001f600?\U0001f600",
    "http://host.invalid/{}|^`<>\"'",
    f"{NOBODY}/%E6%97%A5?%26=%3D",
    "http://[::1]:9/",
    "http://[::ffff:127.0.0.1]:9/",
    "http://0x7f.1:9/",
    "http://2130706433:9/",
    "https://127.0.0.1:9/",
    LONGEST,
    GOOD,
    GOOD,
]


def resolver_is_slow() -> bool:
    """Return whether this machine takes seconds to find that a name does not exist: offline, it
    may."""
    began = time.monotonic()
    with pytest.raises(OSError, match="."):
        socket.getaddrinfo("host.invalid", 80)
    return time.monotonic() - began > 1


def test_odd_urls_are_kept_exactly(caller: Caller) -> None:
    job = caller.submit(status="open")
    caller.http.post(f"/jobs/{job['job_id']}/pause")
    caller.http.post(f"/jobs/{job['job_id']}/tasks", json={"tasks": [{"url": u} for u in ODD_URLS]})

    assert [row["url"] for row in caller.results(job)] == ODD_URLS
    caller.http.post(f"/jobs/{job['job_id']}/stop")


@fetches
def test_odd_urls_come_back_exactly_and_no_worker_dies_of_one(caller: Caller, site: Site) -> None:
    rows = caller.scraped(*ODD_URLS, max_attempts=2)

    assert [row["url"] for row in rows] == ODD_URLS
    assert len({row["task_id"] for row in rows}) == len(ODD_URLS)
    assert {row["status"] for row in rows} == {"failed"}
    by_url = {row["url"]: row["error"]["code"] for row in rows}
    impossible = {url for url, code in by_url.items() if code == "impossible_host"}
    assert impossible == set(ODD_URLS[6:10])
    others = {code for url, code in by_url.items() if url not in impossible}
    assert others <= {"host_not_found", "connection_failed"} | (
        {"timeout"} if resolver_is_slow() else set()
    )
    assert "pass%20word" not in json.dumps([row["error"] for row in rows])
    run = caller.get(f"/jobs/{rows[0]['job_id']}")["latest_run"]
    assert run["stats"]["failure_reasons"]["bad_target"] == len(impossible)
    [alive] = caller.scraped(site.put("/alive", Page(b"alive")))
    assert caller.content(alive).content == b"alive"


@fetches
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/%E6%97%A5%2F%2e%2e/%7e?q=%26&r=%zz", "/%E6%97%A5%2F%2e%2e/%7e?q=%26&r=%zz"),
        ("/a/../b/./c//d;p?x=1&x=2&&=#part", "/a/../b/./c//d;p?x=1&x=2&&="),
        ("/日本?ü=ß", "/%E6%97%A5%E6%9C%AC?%C3%BC=%C3%9F"),
        ("/two words", "/two%20words"),
        ("/{curly}|^`'!$&()*+,;=:@~", "/{curly}|^`'!$&()*+,;=:@~"),
    ],
)
def test_a_path_is_asked_for_as_it_was_given(
    caller: Caller, site: Site, path: str, sent: str
) -> None:
    site.put(sent.partition("?")[0], Page(b"found"))
    [row] = caller.scraped(site.origin + path)

    assert (row["url"], row["status"]) == (site.origin + path, "successful")
    assert caller.content(row).content == b"found"
    assert site.hits[sent] == 1


BAD_TASKS: list[tuple[Any, str]] = [
    ({"url": "ftp://files.invalid/"}, "unsupported_scheme"),
    ({"url": "javascript:alert(1)"}, "unsupported_scheme"),
    ({"url": "file:///etc/passwd"}, "unsupported_scheme"),
    ({"url": "data:text/html,x"}, "unsupported_scheme"),
    ({"url": "localhost:9000/x"}, "unsupported_scheme"),
    ({"url": "http:///x"}, "missing_host"),
    ({"url": "http:x"}, "missing_host"),
    ({"url": "https://?q"}, "missing_host"),
    ({"url": "http://user:hidden@/x"}, "missing_host"),
    ({"url": "http://[::1/"}, "malformed_url"),
    ({"url": "http://::1]/"}, "missing_host"),
    ({"url": "http://user:hidden@[::1/"}, "malformed_url"),
    ({"url": "http://256.1.1.1/"}, "malformed_url"),
    ({"url": "http://h.invalid:99999/"}, "malformed_url"),
    ({"url": "http://h.invalid:port/"}, "malformed_url"),
    ({"url": "http://a<b>.invalid/"}, "malformed_url"),
    ({"url": "example.com/x"}, "malformed_url"),
    ({"url": ""}, "malformed_url"),
    ({"url": " http://h.invalid/"}, "malformed_url"),
    ({"url": "http://h.invalid/\n"}, "malformed_url"),
    ({"url": "http://h.invalid/\x00"}, "malformed_url"),
    ({"url": "http://h\t.invalid/"}, "malformed_url"),
    ({"url": LONGEST + "x"}, "url_too_long"),
    ({"url": 5}, "malformed_url"),
    ({"url": None}, "malformed_url"),
    ({"url": ["http://h.invalid/"]}, "malformed_url"),
    ({}, "malformed_url"),
    ("http://h.invalid/", "malformed_url"),
    (None, "malformed_url"),
    ([], "malformed_url"),
    ({"url": GOOD, "external_id": "id\n"}, "invalid_external_id"),
    ({"url": GOOD, "external_id": "two words"}, "invalid_external_id"),
    ({"url": GOOD, "external_id": ""}, "invalid_external_id"),
    ({"url": GOOD, "external_id": "a" * 129}, "invalid_external_id"),
    ({"url": GOOD, "external_id": 7}, "invalid_external_id"),
    ({"url": GOOD, "metadata": {"k" * 129: "v"}}, "metadata_key_invalid"),
    ({"url": GOOD, "metadata": {"k\n": "v"}}, "metadata_key_invalid"),
    ({"url": GOOD, "metadata": {"k": "v" * 1_025}}, "metadata_too_large"),
    ({"url": GOOD, "metadata": {f"k{n}": "" for n in range(21)}}, "metadata_too_large"),
    ({"url": GOOD, "metadata": {"k": 1}}, "metadata_key_invalid"),
    ({"url": GOOD, "metadata": []}, "metadata_key_invalid"),
    ({"url": GOOD, "method": "PUT"}, "unsupported_method"),
    ({"url": GOOD, "method": "GET\n"}, "unsupported_method"),
    ({"url": GOOD, "method": 1}, "unsupported_method"),
    ({"url": GOOD, "body": "x"}, "body_not_allowed"),
    ({"url": GOOD, "method": "POST", "body": "x" * 16_385}, "body_too_large"),
    ({"url": GOOD, "method": "POST", "body": ["x" * 16_381]}, "body_too_large"),
    (
        {"url": GOOD, "method": "POST", "zenrows_params": {"js_render": True}},
        "method_param_conflict",
    ),
    ({"url": GOOD, "zenrows_params": {"no_such": 1}}, "unknown_param"),
    ({"url": GOOD, "zenrows_params": {"wait": -1}}, "invalid_param_value"),
    ({"url": GOOD, "zenrows_params": {"wait": None}}, "invalid_param_value"),
    (
        {"url": GOOD, "zenrows_params": {"custom_headers": {"A": "b\r\nC: d"}}},
        "invalid_param_value",
    ),
    ({"url": GOOD, "zenrows_params": []}, "invalid_param_value"),
]


@pytest.mark.parametrize("adding", [False, True], ids=["submit", "add"])
def test_every_bad_task_is_listed_and_nothing_is_created(server: Serving, adding: bool) -> None:
    tasks = [task for bad, _ in BAD_TASKS for task in (bad, {"url": GOOD})]
    with Caller(server.api, f"key-of-bad-tasks-{adding}") as caller:
        path, expected_jobs = "/jobs", 0
        if adding:
            path = f"/jobs/{caller.submit(status='open')['job_id']}/tasks"
            expected_jobs = 1
        problem = problem_of(
            caller.http.post(path, json={"tasks": tasks}), status=400, code="invalid_argument"
        )
        jobs = caller.get("/jobs")["jobs"]

    listed = Problem.model_validate_json(json.dumps(problem)).invalid_tasks
    assert listed is not None
    assert [(task.index, task.reason.value) for task in listed] == [
        (2 * number, reason) for number, (_, reason) in enumerate(BAD_TASKS)
    ]
    assert "hidden" not in json.dumps(problem)
    assert all(len(task.value or "") <= 120 for task in listed)
    assert len(jobs) == expected_jobs
    assert all(job["latest_run"]["stats"]["total"] == 0 for job in jobs)


def test_what_is_at_a_limit_is_taken(caller: Caller) -> None:
    task: Json = {
        "url": LONGEST,
        "external_id": "a" * 128,
        "metadata": {f"{n:0128d}": "v" * 1_024 for n in range(20)},
        "method": "pOsT",
        "body": "x" * 16_384,
        "zenrows_params": {
            "custom_headers": {f"X-{n}": "v" for n in range(32)},
            "wait": 30_000,
        },
    }
    job = caller.submit(task, name="n" * 100, external_id="e" * 128, status="open")
    [row] = caller.results(job)

    assert (row["url"], row["external_id"], row["method"]) == (LONGEST, "a" * 128, "POST")
    assert row["metadata"] == task["metadata"]
    assert "body" not in row
    caller.http.post(f"/jobs/{job['job_id']}/stop")
