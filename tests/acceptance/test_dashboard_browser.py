"""The dashboard in a real Chromium: silent, accessible, the same without scripts, by keyboard
alone, deaf to hostile markup, and with one stream however many tabs there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from conveyor.service.progress import LISTED
from tests.acceptance.support_dashboard import (
    EMPTY,
    PICTURES,
    ROOT,
    Seeded,
    chromium,
    dashboard,
    reader,
    seed,
)
from tests.acceptance.support_wire import eventually, target
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

RULES = {
    "runOnly": {
        "type": "tag",
        "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
    }
}
WIDE, NARROW = {"width": 1_280, "height": 900}, {"width": 360, "height": 780}
MANY = 200
TASKS_OF_MANY = 1_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with dashboard(tmp_path_factory.mktemp("seeded") / "data") as opened:
        seed(opened)
        yield opened


def visit(browser: Browser, origin: str, paths: dict[str, str], label: str, **options: Any) -> None:
    """Look at each page: it says nothing, asks nobody else, and breaks no rule of WCAG 2.2 AA."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    found = []
    with reader(browser, origin, **options) as (context, watched):
        page = context.new_page()
        for name, path in paths.items():
            response = page.goto(path)
            assert response is not None
            if name == "problem":
                assert response.status == 404
                watched.said.clear()  # the browser itself reports the status
            assert page.locator("h1").count() == 1
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= options["viewport"]["width"], f"{name} is {width} wide"
            page.screenshot(path=PICTURES / f"{label}-{name}.png", full_page=True)
            results = Axe().run(page, options=RULES)
            found += [(name, one["id"], one["nodes"][0]["html"]) for one in violations(results)]
        watched.assert_silent()
    assert found == []


def violations(results: Any) -> list[dict[str, Any]]:
    """The rules that a page breaks."""
    listed: list[dict[str, Any]] = results.response["violations"]
    return listed


@pytest.mark.extended
def test_each_page_is_silent_and_accessible(browser: Browser, seeded: Seeded) -> None:
    visit(
        browser,
        seeded.origin,
        seeded.paths,
        "seeded-light-1280",
        color_scheme="light",
        viewport=WIDE,
    )


def test_pages_of_an_empty_store(browser: Browser, tmp_path: Path) -> None:
    with dashboard(tmp_path / "data") as empty:
        options = {"color_scheme": "dark", "viewport": NARROW}
        visit(browser, empty.origin, EMPTY, "empty-dark-360", **options)


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "360"])
def test_each_page_in_each_theme_and_width(
    browser: Browser, seeded: Seeded, scheme: str, viewport: dict[str, int]
) -> None:
    label = f"seeded-{scheme}-{viewport['width']}"
    visit(browser, seeded.origin, seeded.paths, label, color_scheme=scheme, viewport=viewport)


@pytest.mark.extended
def test_pictures_of_the_documentation(browser: Browser, seeded: Seeded) -> None:
    """They are made here and copied to docs/pictures by hand, where pages change their looks."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    viewport = {"width": 1_080, "height": 760}
    with reader(browser, seeded.origin, color_scheme="light", viewport=viewport) as (context, _):
        page = context.new_page()
        for name in ("overview", "run", "task-failed"):
            page.goto(seeded.paths[name])
            keys_work(page)
            made = PICTURES / f"docs-{name}.png"
            page.screenshot(path=made)
            kept = ROOT / "docs" / "pictures" / f"dashboard-{name}.png"
            for picture in (made, kept):
                assert picture.read_bytes()[:4] == b"\x89PNG"
                assert picture.stat().st_size < 150_000


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_each_page_among_many_jobs(browser: Browser, tmp_path: Path) -> None:
    with dashboard(tmp_path / "data") as crowded:
        for number in range(MANY):
            tasks = [target(f"{number}/{task}") for task in range(TASKS_OF_MANY)]
            crowded.submit(f"many-{number}", tasks, name=f"Many {number}")
        for number in range(MANY):
            crowded.ended(f"many-{number}")
        seed(crowded)
        for scheme in ("light", "dark"):
            for viewport in (WIDE, NARROW):
                label = f"crowded-{scheme}-{viewport['width']}"
                options = {"color_scheme": scheme, "viewport": viewport}
                visit(browser, crowded.origin, crowded.paths, label, **options)


def numbers_of(page: Page) -> list[str]:
    """Return the numbers and states on a page, without its guess of the time left."""
    said = page.locator(
        "h1, h3, .badge, .detail, [data-value]:not([data-value=left]), table.small td, pre code"
    )
    return said.all_inner_texts()


def test_without_scripts_pages_show_the_same(browser: Browser, seeded: Seeded) -> None:
    with (
        reader(browser, seeded.origin) as (scripted, watched),
        reader(browser, seeded.origin, java_script_enabled=False) as (plain, also_watched),
    ):
        first, second = scripted.new_page(), plain.new_page()
        for name, path in seeded.paths.items():
            first.goto(path)
            second.goto(path)
            if name == "problem":
                watched.said.clear()
                also_watched.said.clear()
            assert numbers_of(first) == numbers_of(second)
            assert numbers_of(second)
        watched.assert_silent()
        also_watched.assert_silent()
        instant = second.locator("time").first
        second.goto(seeded.paths["run"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", instant.inner_text())


def test_times_are_in_the_zone_of_the_reader(browser: Browser, seeded: Seeded) -> None:
    path = seeded.paths["run"]
    options = {"timezone_id": "Asia/Tokyo", "locale": "en-GB"}
    with reader(browser, seeded.origin, **options) as (context, _):
        page = context.new_page()
        page.goto(path)
        instant = page.locator("time").first
        utc = str(instant.get_attribute("title"))
        hour = (int(utc[11:13]) + 9) % 24
        expect(instant).to_contain_text(f"{hour:02}{utc[13:19]}")


def keys_work(page: Page) -> None:
    """Wait until the script of keys has begun."""
    expect(page.locator("[data-open-keys]")).to_be_visible()


def press_until(page: Page, key: str, text: str) -> None:
    """Press a key until the focus is on something that says this."""
    keys_work(page)
    for _ in range(60):
        page.keyboard.press(key)
        if text in page.evaluate("document.activeElement.innerText"):
            return
    raise AssertionError(f"{key} leads to no {text}")


def test_keys_move_through_rows_and_can_be_turned_off(browser: Browser, seeded: Seeded) -> None:
    with reader(browser, seeded.origin) as (context, watched):
        page = context.new_page()
        page.goto("/dashboard")
        press_until(page, "j", "Catalogue")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("Catalogue of the shop")
        press_until(page, "j", "12 × blocked")
        page.keyboard.press("j")
        press_until(page, "k", "12 × blocked")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("of the group")
        expect(page.locator("tbody tr")).to_have_count(12)
        press_until(page, "j", "failed/403/0")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("GET http://fake.test/failed/403/0")
        expect(page.locator("#error + strong")).to_have_text("Scripted 403")

        page.goto("/dashboard/jobs")
        keys_work(page)
        page.keyboard.press("/")
        page.keyboard.type("jk?Cat")
        assert page.locator("[data-filter]").input_value() == "jk?Cat"
        page.keyboard.press("Enter")
        expect(page.get_by_text("0 found")).to_be_visible()
        keys_work(page)
        page.keyboard.press("?")
        expect(page.locator("dialog")).to_be_visible()
        page.keyboard.press("Tab")
        page.get_by_label("Single keys are on").uncheck()
        page.keyboard.press("Escape")
        page.reload()
        keys_work(page)
        page.keyboard.press("?")
        expect(page.locator("dialog")).to_be_hidden()
        watched.assert_silent()


def test_a_group_is_run_again_by_keyboard_alone(browser: Browser, seeded: Seeded) -> None:
    slow = [target(f"again/{n}", status=503 if n < 4 else 404, delay=0.5) for n in range(5)]
    seeded.submit("again", [*slow, target("again/good")], name="Again and again")
    seeded.ended("again")
    with reader(browser, seeded.origin) as (context, watched):
        page = context.new_page()
        page.goto("/dashboard")
        press_until(page, "j", "Again and again")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("Again and again")
        press_until(page, "j", "4 × ")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(4)
        page.go_back()
        press_until(page, "Tab", "Run this group again")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("run 2")
        expect(page.locator(".facts .badge")).to_have_text("completed", timeout=30_000)
        expect(page.locator("[data-value=failed]").first).to_have_text("5")
        watched.assert_silent()
    stats = seeded.ended("again")["stats"]
    assert (stats["failed"], stats["inherited"]) == (5, 2)


def test_actions_work_without_scripts(browser: Browser, seeded: Seeded) -> None:
    seeded.submit("held", [target("held", hang=1)], name="Held")
    seeded.submit("plain", [target("plain/gone", status=404), target("plain")], name="Plain forms")
    seeded.ended("plain")
    with reader(browser, seeded.origin, java_script_enabled=False) as (context, watched):
        page = context.new_page()
        badge = page.locator(".facts .badge")
        page.goto(f"/dashboard/jobs/{seeded.jobs['held']}")
        for label, state in (("Pause", "paused"), ("Resume", "running"), ("Stop", "stopped")):
            page.get_by_role("button", name=label, exact=True).click()
            expect(badge).to_have_text(state)
        page.goto(f"/dashboard/jobs/{seeded.jobs['plain']}")
        page.get_by_role("button", name="Run this group again").click()
        expect(page.locator("h1")).to_contain_text("run 2")
        seeded.ended("plain")
        page.reload()
        expect(badge).to_have_text("completed")

        page.goto("/dashboard/jobs?name=Plain")
        page.get_by_label("With all that match").select_option("delete")
        page.get_by_role("button", name="Go on").click()
        page.get_by_label("Type 1 to go on").fill("2")
        page.get_by_role("button", name="Delete 1 job").click()
        expect(page.get_by_role("alert")).to_contain_text("Nothing was done")
        assert watched.said == [
            "Failed to load resource: the server responded with a status of 409 (Conflict)"
        ]
        watched.said.clear()
        page.get_by_label("Type 1 to go on").fill("1")
        page.get_by_role("button", name="Delete 1 job").click()
        expect(page.get_by_role("status")).to_contain_text("Done for 1 of 1 job")
        watched.assert_silent()


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'`"
PAGE = (
    "<!doctype html><base href=//evil.test><script>alert(3);top.document.title='taken'</script>"
    "<img src=//evil.test/i onerror=alert(4)><svg onload=alert(5)><form action=//evil.test>"
    "<iframe src=javascript:alert(6)></iframe><meta http-equiv=refresh content='0;//evil.test'>"
    "<p>The page itself</p>"
)


def test_hostile_markup_stands_there_as_text(browser: Browser, seeded: Seeded) -> None:
    urls: list[Any] = [
        target("page<svg onload=alert(7)>", body=PAGE),
        {
            "url": target("failed/<b>", status=404, detail=HOSTILE, code="<i>"),
            "external_id": "x",
            "metadata": {"<script>alert(8)</script>": HOSTILE},
        },
        target("data.json", type="application/json", body='{"a": "</pre><script>alert(9)"}'),
        target(
            "icon",
            type="image/svg+xml",
            body="<svg xmlns='http://www.w3.org/2000/svg' onload='alert(10)'/>",
        ),
    ]
    seeded.submit("hostile", urls, name=HOSTILE)
    seeded.ended("hostile")
    rows = seeded.tasks("hostile")
    run = seeded.run_of("hostile")
    options = {"viewport": WIDE}
    with reader(browser, seeded.origin, **options) as (context, watched):
        page = context.new_page()
        for path in (
            "/dashboard",
            f"/dashboard/jobs?name={HOSTILE.replace('{', '%7B')}&external_id=<script>alert(11)",
            run,
            f"{run}/results",
            *(f"{run}/tasks/{row['task_id']}" for row in rows),
        ):
            page.goto(path)
            assert page.title().endswith("· Conveyor")
            assert page.locator("main script, main img, main svg:not(.bar)").count() == 0
        page.goto(run)
        expect(page.locator("h1")).to_contain_text(HOSTILE)
        expect(page.locator(".groups .detail")).to_contain_text(HOSTILE)

        page.goto(f"{run}/tasks/{rows[0]['task_id']}")
        frame = page.frame_locator("iframe.body")
        expect(frame.locator("pre")).to_contain_text("top.document.title='taken'")
        page.get_by_text("Render it, without scripts").click()
        expect(frame.locator("p")).to_have_text("The page itself")
        assert page.title() != "taken"
        # Alone in a tab it is as harmless: the answer itself carries the sandbox.
        page.goto(f"{run}/tasks/{rows[0]['task_id']}/preview?as=html")
        expect(page.locator("p")).to_have_text("The page itself")
        assert page.title() != "taken"
        watched.foreign[:] = [url for url in watched.foreign if "evil.test" not in url]
        watched.assert_silent()


LINES = """cells => cells.map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map(line => line.top)).size;
})"""
"""Counts the lines that each cell of a table takes."""


def test_a_name_without_spaces_makes_no_page_wide(browser: Browser, seeded: Seeded) -> None:
    urls: list[Any] = [{"url": target("w" * 200, hang=1), "external_id": "e" * 100}]
    seeded.submit("long", urls, name="n" * 100, external_id="x" * 100)
    seeded.until("long", lambda run: run["status"] == "running")
    [row] = seeded.tasks("long")
    run = seeded.run_of("long")
    task = f"{run}/tasks/{row['task_id']}"
    with reader(browser, seeded.origin, viewport=NARROW) as (context, watched):
        page = context.new_page()
        for path in ("/dashboard", "/dashboard/jobs", run, f"{run}/results", task):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], path
        page.set_viewport_size({"width": 900, "height": 800})
        page.goto("/dashboard/jobs")
        lines = page.locator("td.number").evaluate_all(LINES)
        # A job that never ran has no numbers.
        assert set(lines) <= {0, 1}
        assert 1 in lines
        watched.assert_silent()
    seeded.calls.post(f"/jobs/{seeded.jobs['long']}/stop")


def streams(origin: str) -> float:
    """Streams that the server has open."""
    metrics = httpx.get(f"{origin}/metrics", trust_env=False, timeout=SECONDS).text
    found = re.search(r"^conveyor_streams (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_ten_tabs_share_one_stream(browser: Browser, seeded: Seeded) -> None:
    origin = seeded.origin
    seeded.submit("shared", [target(f"t/{n}", hang=1) for n in range(3)], name="Shared")
    with reader(browser, origin) as (context, watched):
        tabs = [context.new_page() for _ in range(10)]
        for tab in tabs:
            tab.goto(seeded.run_of("shared"))
        eventually(lambda: streams(origin) == 1 or None, "one stream")
        late = context.new_page()
        late.goto("/dashboard")
        seeded.calls.post(f"/jobs/{seeded.jobs['shared']}/stop")
        for tab in tabs:
            expect(tab.locator(".facts .badge")).to_have_text("stopped")
            expect(tab.locator("[data-notice]")).to_contain_text("A run has ended")
        shown = late.locator("tr", has_text="Shared").first.locator(".badge")
        expect(shown).to_have_text("stopped")
        assert streams(origin) == 1

        for tab in [*tabs, late]:
            hide(tab, "hidden")
        eventually(lambda: streams(origin) == 0 or None, "no stream")
        hide(late, "visible")
        eventually(lambda: streams(origin) == 1 or None, "one stream again")
        watched.assert_silent()


def hide(page: Page, state: str) -> None:
    """Tell a tab that it is hidden or visible: a browser without windows hides none."""
    page.evaluate(
        "state => document.dispatchEvent(new CustomEvent('conveyor:visibility', {detail: state}))",
        state,
    )


def test_a_tab_without_locks_has_a_stream_of_its_own(browser: Browser, seeded: Seeded) -> None:
    seeded.submit("alone", [target("alone", hang=1)], name="Alone")
    with reader(browser, seeded.origin) as (context, watched):
        context.add_init_script("delete Navigator.prototype.locks")
        tabs = [context.new_page() for _ in range(2)]
        for tab in tabs:
            tab.goto(seeded.run_of("alone"))
        eventually(lambda: streams(seeded.origin) == 2 or None, "two streams")
        seeded.calls.post(f"/jobs/{seeded.jobs['alone']}/stop")
        for tab in tabs:
            expect(tab.locator(".facts .badge")).to_have_text("stopped")
        watched.assert_silent()


@pytest.mark.extended
def test_pages_of_runs_live_on_behind_many_others(browser: Browser, seeded: Seeded) -> None:
    for label in ("old", "older"):
        seeded.submit(label, [target(label, hang=1)], name=label)
        seeded.until(label, lambda run: run["status"] == "running")
    for number in range(LISTED + 5):
        seeded.submit(f"later {number}", [target("page")])
    seeded.ended(f"later {LISTED + 4}")
    with reader(browser, seeded.origin) as (context, watched):
        tabs = {label: context.new_page() for label in ("old", "older")}
        for label, tab in tabs.items():
            tab.goto(seeded.run_of(label))
            keys_work(tab)
        eventually(lambda: streams(seeded.origin) == 1 or None, "one stream")
        for label, tab in tabs.items():
            expect(tab.locator("[data-notice]")).to_be_hidden()
            seeded.calls.post(f"/jobs/{seeded.jobs[label]}/pause")
            expect(tab.locator(".facts .badge")).to_have_text("paused")
            expect(tab.locator("[data-value=left]")).to_have_text("")
            # The buttons, and the line about waiting, are those of a run at work.
            expect(tab.locator("[data-notice]")).to_contain_text("This page is older than its run")
            seeded.calls.post(f"/jobs/{seeded.jobs[label]}/stop")
            expect(tab.locator(".facts .badge")).to_have_text("stopped")
            expect(tab.locator("[data-notice]")).to_contain_text("A run has ended: stopped")
        assert streams(seeded.origin) == 1
        watched.assert_silent()


def test_an_overview_tells_of_a_new_run(browser: Browser, seeded: Seeded) -> None:
    with reader(browser, seeded.origin) as (context, watched):
        page = context.new_page()
        page.goto("/dashboard")
        eventually(lambda: streams(seeded.origin) == 1 or None, "one stream")
        expect(page.locator("[data-notice]")).to_be_hidden()
        seeded.submit("new", [target("new", hang=1)], name="Brand new")
        expect(page.locator("[data-notice]")).to_contain_text("A new run has begun")
        page.get_by_role("link", name="Show the page anew").click()
        row = page.locator("tr", has_text="Brand new")
        expect(row.locator(".badge")).to_have_text("running")
        expect(page.locator("[data-notice]")).to_be_hidden()
        seeded.calls.post(f"/jobs/{seeded.jobs['new']}/stop")
        expect(row.first.locator(".badge")).to_have_text("stopped")
        watched.assert_silent()


@pytest.mark.extended
def test_a_page_says_that_it_has_no_connection(browser: Browser, seeded: Seeded) -> None:
    with reader(browser, seeded.origin) as (context, _):
        context.route("**/dashboard/events*", lambda route: route.abort())
        tabs = [context.new_page() for _ in range(2)]
        for tab in tabs:
            tab.goto(seeded.paths["run-live"])
        for tab in tabs:
            expect(tab.get_by_text("No connection: the numbers may be old.")).to_be_visible()
        context.unroute("**/dashboard/events*")
        for tab in tabs:
            expect(tab.locator("[data-offline]")).to_be_hidden(timeout=10_000)
