"""The small site of the demonstration: whole, varied, and served as it is."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser

import httpx
import pytest

from conveyor.demo.site import Moods, content_type, pages, serve_site
from tests.patient import SECONDS

PAGES = pages()
HTML = sorted(name for name in PAGES if name.endswith(".html"))


def charset(name: str) -> str:
    return content_type(name).partition("charset=")[2] or "utf-8"


def test_there_is_enough_of_it_and_it_is_varied() -> None:
    assert len(PAGES) >= 24
    assert {charset(name) for name in HTML} == {"utf-8", "Shift_JIS", "windows-1251", "iso-8859-1"}
    kinds = {content_type(name).partition(";")[0] for name in PAGES}
    assert {"application/pdf", "application/json", "text/csv", "image/svg+xml"} <= kinds
    assert PAGES["empty.txt"] == b""
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in PAGES)


class Links(HTMLParser):
    """Collects what a page points at, its language and the charset it states."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.language = ""
        self.charset = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.add(value)
            elif name == "lang" and tag == "html":
                self.language = value or ""
            elif name == "charset":
                self.charset = value or ""


@pytest.mark.parametrize("name", HTML)
def test_every_page_reads_in_the_charset_it_states_and_links_to_pages(name: str) -> None:
    links = Links()
    links.feed(PAGES[name].decode(charset(name)))
    assert links.charset.lower() == charset(name).lower()
    assert links.language
    assert links.targets <= set(PAGES)


def test_pages_in_other_charsets_are_not_utf_8() -> None:
    for name in ("ja.sjis.html", "ru.cp1251.html", "fr.latin1.html"):
        with pytest.raises(UnicodeDecodeError):
            PAGES[name].decode()


def test_the_leaflet_points_at_its_own_parts() -> None:
    leaflet = PAGES["leaflet.pdf"]
    start = int(re.findall(rb"startxref\n(\d+)", leaflet)[0])
    assert leaflet[start:].startswith(b"xref")
    offsets = re.findall(rb"^(\d{10}) 00000 n", leaflet, re.MULTILINE)
    for number, offset in enumerate(offsets, start=1):
        assert leaflet[int(offset) :].startswith(b"%d 0 obj" % number)


@pytest.mark.slow
def test_a_moody_site_has_its_troubles_once_and_then_every_page() -> None:
    moods = Moods()
    with (
        serve_site(moods=moods) as origin,
        httpx.Client(timeout=SECONDS, trust_env=False) as client,
    ):

        def visit(name: str) -> None:
            first = []
            with suppress(httpx.RemoteProtocolError):
                first = [client.get(f"{origin}/{name}")]
            for answer in first:
                assert answer.status_code in (200, 429, 503)
                assert ("Retry-After" in answer.headers) == (answer.status_code == 429)
            if not first or first[0].status_code != 200:
                assert client.get(f"{origin}/{name}").content == PAGES[name]

        # Each page takes its time.
        with ThreadPoolExecutor(len(PAGES)) as visitors:
            list(visitors.map(visit, PAGES))
    assert moods.troubles == {"429": 1, "503": 5, "broken connection": 2}


@pytest.mark.slow
def test_it_is_served_byte_for_byte() -> None:
    with serve_site() as origin, httpx.Client(timeout=SECONDS, trust_env=False) as client:
        for name, body in PAGES.items():
            response = client.get(f"{origin}/{name}")
            assert (response.status_code, response.content) == (200, body)
            assert response.headers["Content-Type"] == content_type(name)
        assert client.get(f"{origin}/").content == PAGES["index.html"]
        assert client.get(f"{origin}/../cli.py").status_code == 404
        assert client.get(f"{origin}/.gitattributes").status_code == 404
