"""The dashboard in a real browser: a server with jobs of every kind, and Chromium before it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    sync_playwright,
)

from conveyor.testing.local_server import conveyor_server
from tests.acceptance.support_wire import ENDED, KEY, eventually, target

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "pages"
FLAGS = [
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",
]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080600000"
    "01f15c4890000000d49444154789c63d8d8f0df1e0005fe025ddc7a60ac0000000049454e44ae426082"
)
"""An image of one pixel."""
FAILURES: dict[int, dict[str, float | str]] = {
    12: {"status": 403, "code": "BLOCKED", "detail": "Access to page 4711 was denied"},
    5: {"status": 404, "detail": "No document at /products/17"},
    3: {"status": 422, "code": "RESP001", "detail": "The selector .price matched 0 elements"},
    1: {"status": 400, "detail": "The host has 1 address too few"},
}
"""Numbers of failed tasks, each with the answer that makes them fail."""


def find_browser() -> str | None:
    """Return the path of a Chromium, if there is one."""
    found = subprocess.run(
        [ROOT / "scripts" / "browser", "--find"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else None


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Without one the test is skipped, or fails where `CI` is set."""
    path = find_browser()
    if path is None:
        assert not os.environ.get("CI"), "there is no Chromium: scripts/browser installs one"
        pytest.skip("there is no Chromium: scripts/browser installs one")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """All that a browser said and asked for: nothing of it may be amiss."""

    origin: str
    said: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Note what a page says, asks for and opens."""
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self._see(request.url))

    def _hear(self, message: ConsoleMessage) -> None:
        # A frame that its own policy silences may say so.
        if "/preview" not in str(message.location.get("url", "")):
            self.said.append(message.text)

    def _dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _see(self, url: str) -> None:
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc}" != self.origin and parts.scheme != "data":
            self.foreign.append(url)

    def assert_silent(self) -> None:
        """Assert that nothing was amiss."""
        assert (self.said, self.foreign, self.dialogs) == ([], [], [])


@contextmanager
def reader(
    browser: Browser, origin: str, **options: Any
) -> Iterator[tuple[BrowserContext, Watched]]:
    """A browser of its own, watched."""
    watched = Watched(origin)
    context = browser.new_context(base_url=origin, **options)
    context.on("page", watched.watch)
    try:
        yield context, watched
    finally:
        context.close()


@dataclass
class Seeded:
    """A server with jobs. `paths` names a page of every kind; `calls` is a client of the API."""

    base_url: str
    calls: httpx.Client
    jobs: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return self.base_url.removesuffix("/v1")

    def submit(self, label: str, urls: Sequence[str | Mapping[str, Any]], **fields: Any) -> str:
        """Create a job of these URLs under a label; return its id."""
        tasks = [{"url": url} if isinstance(url, str) else url for url in urls]
        answer = self.calls.post("/jobs", json={"tasks": tasks, "max_attempts": 1, **fields})
        assert answer.status_code in (201, 202), answer.text
        body = answer.json()
        self.jobs[label] = body["job_id"]
        if "latest_run" in body:
            self.runs[label] = body["latest_run"]["run_id"]
        return str(body["job_id"])

    def run_of(self, label: str) -> str:
        """Return the address of the run of a job."""
        return f"/dashboard/jobs/{self.jobs[label]}/runs/{self.runs[label]}"

    def until(
        self, label: str, holds: Callable[[Mapping[str, Any]], bool], *, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Wait for a state of the latest run of a job, and return it."""

        def look() -> dict[str, Any] | None:
            run: dict[str, Any] = self.calls.get(f"/jobs/{self.jobs[label]}").json()["latest_run"]
            return run if holds(run) else None

        return eventually(look, f"the run of {label}", timeout=timeout)

    def ended(self, label: str) -> dict[str, Any]:
        """Wait for the end of the latest run of a job, and return it."""
        return self.until(label, lambda run: run["status"] in ENDED)

    def tasks(self, label: str, **query: str) -> list[dict[str, Any]]:
        """The results of the latest run of a job."""
        answer = self.calls.get(f"/jobs/{self.jobs[label]}/results", params=query)
        found: list[dict[str, Any]] = answer.json()["results"]
        return found


@contextmanager
def dashboard(directory: Path, **settings: Any) -> Iterator[Seeded]:
    """A server without a job."""
    with (
        conveyor_server(directory, **settings) as server,
        httpx.Client(
            base_url=server.base_url, headers={"X-API-Key": KEY}, timeout=60, trust_env=False
        ) as calls,
    ):
        yield Seeded(server.base_url, calls)


def product_page(number: int) -> str:
    """Return a page as a shop might have it."""
    lines = "".join(f"<li>Part {part}: {part * number} EUR</li>\n" for part in range(1, 9))
    return (
        f"<!doctype html>\n<title>Product {number}</title>\n<h1>Product {number}</h1>\n"
        f"<p>In stock, 2 to 3 days.</p>\n<ul>\n{lines}</ul>\n"
    )


def seed(seeded: Seeded) -> None:
    """Make jobs of every kind: what the pictures show."""
    pages = [target(f"products/{n}", body=product_page(n)) for n in range(1, 9)]
    pages += [target(f"products/{n}", size=900 * n) for n in range(9, 41)]
    pages += [target(f"thin/{n}") for n in range(23)]
    pages += [
        target("prices.json", type="application/json", body='{"price": [1, 2, 3]}'),
        target("about", type="text/html", body="<h1>About</h1><p>A shop.</p>"),
    ]
    for number, answer in FAILURES.items():
        pages += [target(f"failed/{answer['status']}/{n}", **answer) for n in range(number)]
    tasks: list[Any] = list(pages)
    tasks[0] = {"url": pages[0], "external_id": "sku-1", "metadata": {"shelf": "A 3"}}
    seeded.submit(
        "catalogue",
        tasks,
        name="Catalogue of the shop",
        external_id="catalogue-7",
        zenrows_params={"custom_headers": {"Authorization": "Bearer hunter2"}, "js_render": True},
        webhook={"url": f"{seeded.origin}/_dev/inbox/shop.test", "events": ["run.completed"]},
    )
    seeded.submit("small", [target("only/page")], name="One page")
    seeded.ended("catalogue")
    stopped = seeded.submit("stopped", [target(f"s/{n}", hang=1) for n in range(4)], name="Archive")
    assert seeded.calls.post(f"/jobs/{stopped}/stop").status_code == 200
    paused = seeded.submit("paused", [target(f"p/{n}", hang=1) for n in range(4)], name="Reviews")
    assert seeded.calls.post(f"/jobs/{paused}/pause").status_code == 200
    live = [target(f"live/{n}") for n in range(14)] + [target(f"h/{n}", hang=1) for n in range(9)]
    live += [target("live/gone", status=404, detail="No document at /live/3")]
    seeded.submit("live", live, name="Prices of today", priority=8)
    seeded.until("live", lambda run: run["stats"]["completed"] == 15)
    seeded.submit(
        "scheduled",
        [target("news")],
        name="News each morning",
        type="scheduled",
        schedule={
            "calendar": {"times_of_day": ["07:00"], "cadence": {"daily": {}}},
            "timezone": "Europe/Berlin",
        },
    )
    emptied = seeded.submit("emptied", [target("emptied")], name="Of last year")
    seeded.ended("emptied")
    gone = seeded.calls.delete(f"/jobs/{emptied}/runs/{seeded.runs['emptied']}")
    assert gone.is_success, gone
    _name_pages(seeded)


def _name_pages(seeded: Seeded) -> None:
    job, run = seeded.jobs["catalogue"], seeded.run_of("catalogue")
    rows = seeded.tasks("catalogue", limit="1000")
    failed = next(row for row in rows if row["status"] == "failed")
    delivered = eventually(
        lambda: next(iter(seeded.calls.get("/webhook/deliveries").json()["deliveries"]), None),
        "an event of the catalogue",
    )
    seeded.paths |= {
        "overview": "/dashboard",
        "jobs": "/dashboard/jobs",
        "jobs-filtered": "/dashboard/jobs?name=Cat&state=completed",
        "job-without-runs": f"/dashboard/jobs/{seeded.jobs['emptied']}",
        "run": run,
        "run-live": seeded.run_of("live"),
        "results": f"{run}/results",
        "results-failed": f"{run}/results?status=failed",
        "task": f"{run}/tasks/{rows[0]['task_id']}",
        "task-failed": f"{run}/tasks/{failed['task_id']}",
        "workers": "/dashboard/workers",
        "webhooks": f"/dashboard/webhooks?job={job}",
        "event": f"/dashboard/jobs/{job}/deliveries/{delivered['delivery_id']}",
        "schedules": "/dashboard/schedules",
        "schedule": f"/dashboard/jobs/{seeded.jobs['scheduled']}/schedule",
        "dead-letters": "/dashboard/dead-letters",
        "problem": "/dashboard/nowhere",
    }


EMPTY = {
    "overview": "/dashboard",
    "jobs": "/dashboard/jobs",
    "workers": "/dashboard/workers",
    "webhooks": "/dashboard/webhooks",
    "schedules": "/dashboard/schedules",
}
"""The pages of a server without jobs."""
