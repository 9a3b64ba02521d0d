"""The pages for people with a browser, made of the document and without a script, and what others
get in their place."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conveyor import __version__
from conveyor.service.schemas import SubmitBody
from tests.unit.http_api import DOCUMENT, Api, open_api

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", public_origin="http://a.test/<x>&'y'") as opened:
        yield opened


class Elements(HTMLParser):
    """The elements of a page, its ids, its links, and its text."""

    EMPTY = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        given = dict(attrs)
        self.attributes |= set(given)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_holds_no_script_and_loads_nothing(api: Api, path: str) -> None:
    response = await api.bare.get(path, headers=BROWSER)

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Vary"] == "Accept"
    page = Elements(response.text)
    assert page.seen.isdisjoint({"script", "link", "img", "iframe", "object", "form", "base"})
    assert page.attributes <= {"lang", "charset", "name", "content", "href", "class", "id", "open"}
    [style] = re.findall("<style>(.*?)</style>", response.text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} == set(policy[2:])


@pytest.mark.parametrize("path", ["/", "/docs"])
@pytest.mark.parametrize(
    "accept",
    ["*/*", "application/json", "", "text/*", "text/html;q=0, */*", "text/htmlx"]
    + ["text/html;q=0.000", "text/html; q = 0.00", "text/html;level=1;Q=0."],
)
async def test_whoever_asks_for_something_else_is_told_in_plain_text_where_things_are(
    api: Api, path: str, accept: str
) -> None:
    response = await api.bare.get(path, headers={"Accept": accept})

    assert response.status_code == 200
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Vary"] == "Accept"
    product, _, *places = response.text.splitlines()
    assert product == f"Conveyor {__version__}: scrapes many URLs"
    origin = "http://a.test/<x>&'y'"
    addresses = [place.partition("  ")[0] for place in places]
    assert addresses == [f"{origin}{end}" for end in ("/v1", "/docs", "/openapi.json")]


async def test_the_start_says_where_things_are(api: Api) -> None:
    page = Elements((await api.bare.get("/", headers=BROWSER)).text)

    assert "http://a.test/<x>&'y'/v1" in page.text
    assert "x" not in page.seen
    assert page.links == ["/docs", "/openapi.json", "/healthz", "/readyz", "/metrics"]
    for link in page.links:
        assert (await api.bare.get(link, headers=BROWSER)).status_code == 200


async def test_the_document_is_shown_whole(api: Api) -> None:
    page = Elements((await api.bare.get("/docs", headers=BROWSER)).text)

    assert len(page.ids) == len(set(page.ids))
    operations = [
        operation for methods in DOCUMENT["paths"].values() for operation in methods.values()
    ]
    for operation in operations:
        assert operation["operationId"] in page.ids
        assert operation["summary"] in page.text
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert f"schema-{name}" in page.ids
        for field, described in schema.get("properties", {}).items():
            assert field in page.text
            assert described.get("description", "") in page.text
    assert SubmitBody.__doc__ is not None
    assert SubmitBody.__doc__ in page.text
    # Every link within the page leads somewhere.
    within = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert within
    assert within <= set(page.ids)
    assert {link for link in page.links if not link.startswith("#")} == {"/", "/openapi.json"}


async def test_head_works_where_get_does(api: Api) -> None:
    got = await api.bare.get("/docs", headers=BROWSER)
    head = await api.bare.head("/docs", headers=BROWSER)

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == got.headers["Content-Length"]
