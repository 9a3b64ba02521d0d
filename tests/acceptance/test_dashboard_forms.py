"""Forms of pages in a real browser without scripts: signing in, changing jobs, signing out.

A page sends no referrer, so the browser names no origin with its forms; only a browser can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from conveyor.domain.api_keys import key_hash
from conveyor.http.pages.session import COOKIE
from tests.acceptance.support_dashboard import Seeded, chromium, dashboard, reader
from tests.acceptance.support_wire import KEY, target
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.extended]

OPERATOR, READER = "key-of-an-operator", "key-of-a-reader"
PROXIED: dict[str, Any] = {
    "java_script_enabled": False,
    "extra_http_headers": {"X-Forwarded-For": "10.0.0.1"},
}
"""A browser without scripts whose requests a proxy passed on: it has to sign in."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    operators = f"{key_hash(OPERATOR)} acts,{key_hash(READER)}"
    with dashboard(tmp_path_factory.mktemp("data"), operator_keys=operators) as made:
        yield made


def sign_in(page: Page, key: str) -> None:
    """Sign in on the page that asks for it."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_a_person_signs_in_runs_a_group_again_and_signs_out(
    browser: Browser, seeded: Seeded
) -> None:
    flaky = [target(f"flaky{n}", flaky=1) for n in range(3)]
    seeded.submit("forms", [*flaky, target("gone", status=404), target("good")], name="Forms")
    seeded.ended("forms")
    address = f"/dashboard/jobs/{seeded.jobs['forms']}"
    with reader(browser, seeded.origin, **PROXIED) as (context, watched):
        page = context.new_page()
        answer = page.goto(address)
        assert answer is not None
        assert answer.status == 401
        sign_in(page, KEY)
        page.wait_for_url(f"**{address}")
        [cookie] = context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["secure"]) == (COOKIE, True, True)
        assert KEY not in cookie["value"]
        assert KEY not in page.content()

        page.get_by_role("button", name="Run this group again").first.click()
        page.wait_for_url(f"**{address}")
        stats = seeded.ended("forms")["stats"]
        assert (stats["successful"], stats["failed"], stats["inherited"]) == (4, 1, 2)

        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/dashboard/sign-in")
        assert context.cookies() == []
        assert page.goto(address) is not None
        assert page.get_by_label("API key").is_visible()
        watched.said = [line for line in watched.said if "401" not in line]
        watched.assert_silent()


def test_an_operator_who_reads_has_no_button_and_one_who_acts_has(
    browser: Browser, seeded: Seeded
) -> None:
    seeded.submit("held", [target(f"hold{n}", hang=1) for n in range(2)], name="Held")
    address = f"/dashboard/jobs/{seeded.jobs['held']}"
    for key, buttons in ((READER, 0), (OPERATOR, 1)):
        with reader(browser, seeded.origin, **PROXIED) as (context, _watched):
            page = context.new_page()
            page.goto(address)
            sign_in(page, key)
            page.wait_for_url(f"**{address}")
            assert page.get_by_role("heading", name="Held").is_visible()
            pause = page.get_by_role("button", name="Pause", exact=True)
            assert pause.count() == buttons
            if buttons:
                pause.click()
                page.get_by_role("button", name="Resume").wait_for()
    run = seeded.calls.get(f"/jobs/{seeded.jobs['held']}").json()["latest_run"]
    assert run["pause_state"] == "paused"
    seeded.calls.post(f"/jobs/{seeded.jobs['held']}/stop")


def test_on_this_machine_all_that_match_are_deleted_by_their_number(
    browser: Browser, seeded: Seeded
) -> None:
    for number in range(3):
        seeded.submit(f"old-{number}", [target("old")], name=f"old {number}")
        seeded.ended(f"old-{number}")
    with reader(browser, seeded.origin, java_script_enabled=False) as (context, watched):
        page = context.new_page()
        page.goto("/dashboard/jobs?name=old")
        page.get_by_label("With all that match").select_option("delete")
        page.get_by_role("button", name="Go on").click()
        page.get_by_label("Type 3 to go on").fill("3")
        page.get_by_role("button", name="Delete 3 jobs").click()
        page.get_by_text("Done for 3 of 3 jobs").wait_for()
        watched.assert_silent()
    left = seeded.calls.get("/jobs").json()["jobs"]
    assert [job for job in left if job.get("name", "").startswith("old")] == []


def test_a_page_of_another_port_of_this_machine_changes_nothing(
    browser: Browser, seeded: Seeded, tmp_path: Path
) -> None:
    seeded.submit("aimed", [target("aim", hang=1)], name="Aimed at")
    path = f"/dashboard/jobs/{seeded.jobs['aimed']}/stop"
    token = httpx.get(f"{seeded.origin}/dashboard/bulk?action=stop", timeout=SECONDS).text
    token = token.partition('name="token" value="')[2][:64]
    with (
        dashboard(tmp_path / "other") as other,
        reader(browser, other.origin) as (context, _watched),
    ):
        page = context.new_page()
        page.goto("/healthz")
        page.set_content(
            f'<form method="post" action="{seeded.origin}{path}">'
            f'<input name="token" value="{token}"><button>Go</button></form>'
        )
        with page.expect_response(lambda answer: answer.request.method == "POST") as caught:
            page.get_by_role("button", name="Go").click()
        assert caught.value.status == 403
    run = seeded.calls.get(f"/jobs/{seeded.jobs['aimed']}").json()["latest_run"]
    assert run["status"] == "running"
    seeded.calls.post(f"/jobs/{seeded.jobs['aimed']}/stop")
