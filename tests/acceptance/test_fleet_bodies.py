"""Bodies from a fleet: by the published client as it is, by a link, and from the store itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import metrics
from tests.acceptance.support_client import FLEET_SETTINGS, finish, open_client
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_wire import KEY, Wire, target
from tests.disk import files_below
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

LARGE = 700_000
URLS = [
    *(target(f"bodies/{number}") for number in range(8)),
    target("bodies/none", size=0),
    target("bodies/large", size=LARGE),
    target("bodies/odd", type="text/x-odd", charset="latin-1"),
]


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """A fleet that packs no bodies: only objects of their own have links to the store."""
    with fleet(tmp_path_factory.mktemp("bodies"), **FLEET_SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def wire(shared_fleet: RoleFleet) -> Iterator[Wire]:
    """Requests to whichever api has its turn."""
    with Wire(shared_fleet.api) as wire:
        yield wire


@pytest.fixture(scope="module")
def job_id(wire: Wire) -> str:
    """A job that has ended."""
    made: str = wire.submit(URLS)["job_id"]
    wire.ended(made)
    return made


@pytest.fixture(scope="module")
def links(wire: Wire, job_id: str) -> dict[str, str]:
    """Links to the bodies, by the URLs that they came from."""
    return {row["url"]: row["result_url"] for row in wire.rows(job_id)}


def ask(url: str, method: str = "GET") -> httpx.Response:
    """The answer itself, wherever it leads."""
    return httpx.request(method, url, timeout=SECONDS, trust_env=False, verify=False)


def test_the_published_client_downloads_every_body_byte_for_byte(
    shared_fleet: RoleFleet,
) -> None:
    with open_client(shared_fleet) as client:
        job = client.submit_regular([*URLS])
        finish(job)
        rows = list(job.run.results())
        assert [str(row.url) for row in rows] == URLS
        for row, url in zip(rows, URLS, strict=True):
            assert job.run.download_task_to_memory(row) == expected_body(url)
        found = {one.task_id: one.body for one in job.run.download_to_memory(concurrency=4)}
        wanted = zip(rows, URLS, strict=True)
        assert found == {row.task_id: expected_body(url) for row, url in wanted}


def test_a_link_answers_with_the_bytes_their_type_and_no_script(links: dict[str, str]) -> None:
    for url, link in links.items():
        for answer in (ask(link), ask(f"{link}&redirect=0")):
            assert answer.status_code == 200
            assert answer.content == expected_body(url)
            assert answer.headers["Content-Security-Policy"] == "sandbox"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    odd = ask(links[URLS[-1]])
    assert odd.headers["Content-Type"] == "text/x-odd; charset=latin-1"


def test_a_body_through_an_api_takes_two_calls(
    shared_fleet: RoleFleet, links: dict[str, str]
) -> None:
    link = links[URLS[0]]
    for process in shared_fleet.apis:
        ask(moved(link, process.info.api))  # it knows where the run lies by now
    before = calls(shared_fleet)
    for process in shared_fleet.apis:
        for _ in range(5):
            assert ask(moved(link, process.info.api)).status_code == 200
    made = 5 * len(shared_fleet.apis)
    after = calls(shared_fleet)
    assert {name: after[name] - before[name] for name in after} == {
        "batch_get_item": made,
        "get_item": 0,
        "get_object": made,
    }


def moved(link: str, api: str) -> str:
    """The same link at a certain api."""
    origin = httpx.URL(api)
    return str(httpx.URL(link).copy_with(host=origin.host, port=origin.port))


def calls(fleet: RoleFleet) -> dict[str, int]:
    """The calls to AWS that the apis have made to read."""
    names = ("batch_get_item", "get_item", "get_object")
    found = dict.fromkeys(names, 0)
    for page in metrics(fleet, "api"):
        for line in page.splitlines():
            if line.startswith("conveyor_aws_calls_total{") and 'outcome="ok"' in line:
                for name in names:
                    if f'operation="{name}"' in line:
                        found[name] += round(float(line.rpartition(" ")[2]))
    return found


def test_who_asks_for_it_is_sent_to_the_store_for_a_minute(links: dict[str, str]) -> None:
    for url, link in links.items():
        answer = ask(f"{link}&redirect=1")
        assert (answer.status_code, answer.content) == (307, b"")
        assert answer.headers["Cache-Control"] == "no-store"
        location = answer.headers["Location"]
        assert urlsplit(location).netloc != urlsplit(link).netloc
        assert parse_qs(urlsplit(location).query)["X-Amz-Expires"] == ["60"]
        stored = ask(location)
        assert (stored.status_code, stored.content) == (200, expected_body(url))
        assert stored.headers["Content-Disposition"].startswith("attachment; ")
        assert stored.headers["Content-Type"] == ask(link).headers["Content-Type"]
    assert ask(f"{link}&redirect=1", "HEAD").status_code == 200
    assert ask(f"{link}&redirect=yes").status_code == 400


def test_a_link_that_is_not_ours_or_leads_nowhere_is_not_redirected(
    wire: Wire, links: dict[str, str]
) -> None:
    link = links[URLS[0]]
    assert ask(f"{link[:-1]}{'A' if link[-1] != 'A' else 'B'}&redirect=1").status_code == 403
    gone = wire.submit([target("bodies/gone")])["job_id"]
    wire.ended(gone)
    [row] = wire.rows(gone)
    wire.ask("DELETE", f"/jobs/{gone}")
    for more in ("", "&redirect=1"):
        assert ask(f"{row['result_url']}{more}").status_code == 404
    failed = wire.submit([target("bodies/failed", status=404)])["job_id"]
    wire.ended(failed)
    path = links[URLS[0]].partition("?")[0]
    assert ask(f"{path}?redirect=1").status_code == 403


def test_the_command_line_fetches_from_the_store(
    shared_fleet: RoleFleet, job_id: str, tmp_path: Path
) -> None:
    before = calls(shared_fleet)["get_object"]
    program = Path(sys.executable).with_name("conveyor")
    done = subprocess.run(
        [program, "results", job_id, "--out", str(tmp_path / "out")],
        env={**os.environ, "CONVEYOR_URL": shared_fleet.api, "ZENROWS_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bodies = [path.read_bytes() for path in files_below(tmp_path / "out")]
    for url in URLS:
        assert expected_body(url) in bodies
    assert calls(shared_fleet)["get_object"] == before
