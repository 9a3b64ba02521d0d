"""No caller sees another's data, no private address is fetched, and no served page can do harm."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from conveyor.domain.model import TaskFailure
from conveyor.gateway.direct import DirectGateway
from conveyor.http.app import V1_ROUTES
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, Json, problem_of
from tests.acceptance.support_site import Page, serving_site
from tests.acceptance.support_wire import eventually, target
from tests.disk import files_below

SCRIPT = "<script>parent.location='http://evil.test'</script>"
DOCUMENT = {"tasks": [{"url": "http://good.invalid/"}]}
FLIPPED = {"A": "B"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(tmp_path_factory.mktemp("safety"), "--gateway", "fake") as server:
        yield server


@pytest.fixture
def caller(server: Booted) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


# -- callers --


BODIES: dict[tuple[str, str], object] = {
    ("POST", "/tasks"): DOCUMENT,
    ("PUT", "/webhook"): {"url": "https://93.184.216.34/", "signature": False},
    ("PUT", "/schedule"): {"rate": {"every": 1, "unit": "day"}},
    ("POST", "/state"): {"schedule_state": "paused"},
}
"""The documents that routes want before they look for the job, by method and end of the path."""


def test_another_key_sees_nothing_anywhere(server: Booted, caller: Caller) -> None:
    [row] = caller.scraped(target("mine"))
    ids = {name: row[name] for name in ("job_id", "run_id", "task_id")}
    ids |= {"export_id": "x" * 26, "delivery_id": "x" * 26}
    before = caller.get(f"/jobs/{row['job_id']}")
    walked = 0
    with Caller(server.api, "key-of-a-stranger") as stranger:
        for pattern, methods in V1_ROUTES.items():
            path = pattern.removeprefix("/v1")
            if "{" not in path:
                continue
            unknown = path.format(**{**ids, "job_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"})
            for method in methods:
                body = BODIES.get((method, path[path.rindex("/") :]))
                seen, missing = (
                    problem_of(
                        stranger.http.request(method, asked, json=body),
                        status=404,
                        code="not_found",
                    )
                    for asked in (path.format(**ids), unknown)
                )
                assert seen | {"instance": ""} == missing | {"instance": ""}, pattern
                walked += 1
        assert stranger.get("/jobs") == {"jobs": []}
    assert walked == sum(len(methods) for path, methods in V1_ROUTES.items() if "{" in path)
    assert caller.get(f"/jobs/{row['job_id']}") == before
    assert caller.content(row).status_code == 200


def test_without_a_key_there_is_nothing_but_the_servers_own_pages(server: Booted) -> None:
    with Caller(server.api, key=None) as nobody:
        for pattern, methods in V1_ROUTES.items():
            path = re.sub(r"{\w+}", "01ARZ3NDEKTSV4RRFFQ69G5FAV", pattern.removeprefix("/v1"))
            for method in methods:
                for query in ("", "?apikey=key&X-API-Key=key&api_key=key"):
                    response = nobody.http.request(method, path + query)
                    problem_of(response, status=401, code="unauthenticated")
        response = nobody.http.get("/jobs", headers={"Authorization": "Bearer key"})
        problem_of(response, status=401, code="unauthenticated")
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert nobody.http.get(server.origin + path).status_code == 200


# -- cursors and links --


def forgeries(text: str) -> list[str]:
    """The text with each of some characters changed, cut, and made longer."""
    changed = [
        text[:at] + FLIPPED.get(text[at], "A") + text[at + 1 :] for at in range(0, len(text), 5)
    ]
    return [*changed, text[:-1], text[1:], text + "A", text + text, text.swapcase()]


def test_forged_and_swapped_cursors_are_refused(server: Booted, caller: Caller) -> None:
    jobs = [caller.submit(*(target(f"{n}/{m}") for m in range(3))) for n in range(2)]
    for job in jobs:
        caller.wait(job)
        caller.http.post(f"/jobs/{job['job_id']}/rerun")
        caller.wait(job)
    own, other = (f"/jobs/{job['job_id']}" for job in jobs)
    first_run = f"{own}/runs/{jobs[0]['latest_run']['run_id']}"
    lists: list[tuple[str, Json]] = [
        ("/jobs", {}),
        ("/jobs", {"status": "closed"}),
        ("/jobs", {"type": "regular"}),
        (f"{own}/runs", {}),
        (f"{other}/runs", {}),
        (f"{own}/results", {}),
        (f"{own}/results", {"status": "successful"}),
        (f"{first_run}/results", {}),
        (f"{other}/results", {}),
    ]
    cursors = [caller.get(path, limit=1, **query)["next_cursor"] for path, query in lists]
    with Caller(server.api, "key-of-a-stranger") as stranger:
        stranger.submit(target("his"))
        stranger.submit(target("his"))
        his = stranger.get("/jobs", limit=1)["next_cursor"]
    for number, (path, query) in enumerate(lists):
        assert caller.get(path, cursor=cursors[number], **query)
        swapped = [
            cursor for at, cursor in enumerate(cursors) if at != number and {at, number} != {5, 7}
        ]
        for cursor in [*swapped, his, *forgeries(cursors[number])]:
            response = caller.http.get(path, params={**query, "cursor": cursor})
            problem_of(response, status=400, code="invalid_argument")


def test_a_cursor_of_the_first_run_is_refused_by_another(caller: Caller) -> None:
    job = caller.submit(target("a"), target("b"))
    first = caller.wait(job)["run_id"]
    caller.http.post(f"/jobs/{job['job_id']}/rerun")
    second = caller.wait(job)["run_id"]
    runs = f"/jobs/{job['job_id']}/runs"
    cursor = caller.get(f"{runs}/{first}/results", limit=1)["next_cursor"]
    response = caller.http.get(f"{runs}/{second}/results", params={"cursor": cursor})
    problem_of(response, status=400, code="invalid_argument")


def test_forged_and_swapped_links_are_refused(
    server: Booted, caller: Caller, tmp_path: Path
) -> None:
    one, two = caller.scraped(target("one", body="one"), target("two", body="two"))
    link = urlsplit(one["result_url"])
    fields = dict(field.split("=") for field in link.query.split("&"))
    later = str(int(fields["expires"]) + 1)
    bad = [
        one["result_url"].replace(one["task_id"], two["task_id"]),
        one["result_url"].replace(one["run_id"], one["job_id"]),
        one["result_url"].replace(fields["expires"], later),
        one["result_url"].replace(fields["expires"], fields["expires"] + "0"),
        one["result_url"].replace(fields["expires"], "9" * 30),
        one["result_url"].replace(fields["expires"], "-1"),
        f"{server.origin}{link.path}",
        f"{server.origin}{link.path}?expires={fields['expires']}",
        f"{server.origin}{link.path}?signature={fields['signature']}",
        *(
            f"{server.origin}{link.path}?expires={fields['expires']}&signature={quote(forged)}"
            for forged in [*forgeries(fields["signature"]), "", "ü"]
        ),
    ]
    with Caller(server.api, key=None) as nobody:
        assert nobody.http.get(one["result_url"]).content == b"one"
        for forged in bad:
            problem_of(nobody.http.get(forged), status=403, code="permission_denied")
            problem_of(caller.http.get(forged), status=403, code="permission_denied")
        with boot(tmp_path, "--gateway", "fake") as other:
            moved = f"{other.origin}{link.path}?{link.query}"
            problem_of(nobody.http.get(moved), status=403, code="permission_denied")


def test_a_link_expires(tmp_path: Path) -> None:
    with (
        boot(tmp_path, "--gateway", "fake", result_url_ttl=2) as server,
        Caller(server.api) as caller,
        Caller(server.api, key=None) as nobody,
    ):
        [row] = caller.scraped(target("brief", body="brief"))

        def read_in_time() -> Json | None:
            [fresh] = caller.results({"job_id": row["job_id"]})
            answer = nobody.http.get(fresh["result_url"])
            return fresh if answer.content == b"brief" else None

        fresh = eventually(read_in_time, "a link is followed before it expires")

        def expired() -> httpx.Response | None:
            response = nobody.http.get(fresh["result_url"])
            return None if response.status_code == 200 else response

        refused = eventually(expired, "the link expires")
        problem_of(refused, status=403, code="permission_denied")
        assert caller.content(row).content == b"brief"


# -- what is fetched --

PRIVATE_HOSTS = [
    "127.0.0.1",
    "127.1",
    "0",
    "0.0.0.0",
    "0x7f.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "127。0。0。1",
    "localhost",
    "LOCALHOST",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::7f00:1]",
    "[fe80::1]",
    "[fd00::1]",
    "100.64.0.1",
    "169.254.169.254",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "224.0.0.1",
    "255.255.255.255",
]


def test_private_addresses_are_not_touched(tmp_path: Path) -> None:
    with serving_site() as site, boot(tmp_path, "--gateway", "direct") as server:
        site.put("/secret", Page(b"secret"))
        port = site.origin.rpartition(":")[2]
        urls = [f"http://{host}:{port}/secret" for host in PRIVATE_HOSTS]
        urls.append(f"http://127.0.0.1:{server.port}/metrics")
        urls.append(f"http://user:word@127.0.0.1:{port}/secret")
        with Caller(server.api) as caller:
            rows = caller.scraped(*urls)
            run = caller.get(f"/jobs/{rows[0]['job_id']}")["latest_run"]

    codes = {row["url"]: row["error"]["code"] for row in rows}
    assert codes == dict.fromkeys(urls, "address_refused")
    assert run["stats"]["failure_reasons"] == {"bad_target": len(urls)}
    assert site.hits.total() == 0


async def test_a_redirect_to_a_private_address_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conveyor.gateway.direct.is_public", "127.0.0.2".__eq__)

    async def lookup(host: str, port: int) -> list[str]:
        return {"public.test": ["127.0.0.2"], "private.test": ["127.0.0.1"]}[host]

    with serving_site("127.0.0.2") as public, serving_site() as private:
        public.put("/page", Page(b"page"))
        port = private.origin.rpartition(":")[2]
        gateway = DirectGateway(FakeClock(), lookup=lookup)
        start = public.origin.replace("127.0.0.2", "public.test")
        async with gateway.scrape(ScrapeRequest(f"{start}/page", "key")) as success:
            assert success.content == b"page"
        for number, host in enumerate(("127.0.0.1", "private.test", "[::1]", "0x7f.1")):
            to = {"Location": f"http://{host}:{port}/secret"}
            public.put(f"/{number}", Page(b"", status=302, headers=to))
            with pytest.raises(ScrapeFailed) as caught:
                async with gateway.scrape(ScrapeRequest(f"{start}/{number}", "key")):
                    pass
            assert caught.value.problem.code == "address_refused"
            assert (caught.value.failure, caught.value.retryable) == (TaskFailure.BAD_TARGET, False)
        await gateway.aclose()
    assert public.hits.total() == 5
    assert private.hits.total() == 0


# -- web pages --


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.test"},
        {"Host": "127.0.0.1.evil.test"},
        {"Host": "localhost.evil.test:9000"},
        {"Host": "evil.test@127.0.0.1"},
        {"Host": "192.168.0.7"},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost"},
        {"Origin": "file://"},
        {"Host": "evil.test", "Origin": "http://evil.test"},
    ],
    ids=str,
)
def test_web_pages_cannot_drive_the_server(caller: Caller, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/jobs"), ("POST", "/jobs"), ("GET", "/healthz")):
        url = caller.http.base_url.join(path) if path == "/healthz" else path
        response = caller.http.request(
            method, url, json=DOCUMENT if method == "POST" else None, headers=headers
        )
        problem_of(response, status=403, code="permission_denied")
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_its_own_names_and_origin_are_fine(server: Booted, caller: Caller) -> None:
    for host in ("127.0.0.1", "localhost", f"localhost:{server.port}", "[::1]:80"):
        assert caller.http.get("/jobs", headers={"Host": host}).status_code == 200
    own = caller.http.get("/jobs", headers={"Origin": server.origin})
    assert own.status_code == 200
    assert "Access-Control-Allow-Origin" not in own.headers


def test_what_was_scraped_is_served_without_any_power(server: Booted, caller: Caller) -> None:
    kinds = ("text/html", "image/svg+xml", "text/javascript", "application/pdf")
    rows = caller.scraped(*(target("page", body=SCRIPT, type=kind) for kind in kinds))
    for row in rows:
        for method in ("GET", "HEAD"):
            for url in (caller.task_path(row, "content"), row["result_url"]):
                response = caller.http.request(method, url)
                assert response.status_code == 200
                assert response.headers["Content-Security-Policy"] == "sandbox"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert "Set-Cookie" not in response.headers


# -- the data directory --


def test_the_data_directory_is_its_owners_alone(server: Booted, caller: Caller) -> None:
    caller.scraped(target("kept"))
    assert mode(server.data_dir) == 0o700
    assert mode(server.data_dir / "secret") == 0o600


def test_in_a_directory_that_others_may_enter_every_file_is_private(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    with boot(tmp_path, "--gateway", "fake") as server, Caller(server.api) as caller:
        caller.scraped(target("kept"))
        modes = {path.name: mode(path) for path in files_below(server.data_dir)}
    assert {"secret", "conveyor.db", "lock"} < set(modes)
    assert {bits & 0o077 for bits in modes.values()} == {0}, modes


def mode(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)
