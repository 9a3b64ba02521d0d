"""The main job on real input: a manual, fetched directly, comes back file for file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_pages import (
    find_nginx,
    is_odd,
    manual,
    nginx,
    spellings,
    standard_library,
)

FEWEST = 500
PLAIN = 350
BATCH = 2_000
FLAGS = ("--gateway", "direct", "--allow-private")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(tmp_path_factory.mktemp("pages"), *FLAGS) as server:
        yield server


@pytest.fixture(params=["http.server", "nginx"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The manual, served."""
    root, _ = manual()
    if request.param == "nginx" and find_nginx() is None:
        pytest.skip("nginx is not installed")
    with ExitStack() as stack:
        serving = nginx(root, tmp_path) if request.param == "nginx" else standard_library(root)
        yield stack.enter_context(serving)


def some() -> list[Path]:
    """Every page with an odd name, and plain ones spread over the whole manual."""
    _, pages = manual()
    odd = [page for page in pages if is_odd(page)]
    plain = [page for page in pages if not is_odd(page)]
    return odd + plain[:: len(plain) // PLAIN]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def scrape_and_compare(server: Booted, origin: str, pages: list[Path]) -> None:
    """Scrape pages under every spelling of their URLs; hold all that is stored against them."""
    root, _ = manual()
    urls = {f"{origin}/{text}": page for page in pages for text in spellings(page)}
    before = set(server.files())
    with Caller(server.api) as caller:
        rows = caller.scraped(*urls)
        assert [row["url"] for row in rows] == list(urls)
        failed = [(row["url"], row["error"]) for row in rows if row["status"] != "successful"]
        assert failed == []
        for row in rows:
            answer = caller.content(row)
            page = (root / urls[row["url"]]).read_bytes()
            assert answer.content == page, row["url"]
            assert answer.headers["Content-Type"].startswith("text/html"), row["url"]
        assert all(len(caller.history(row)) == 1 for row in rows[:20])
        stored = set(server.files()) - before
        assert Counter(digest(file.read_bytes()) for file in stored) == Counter(
            digest((root / page).read_bytes()) for page in urls.values()
        )
        caller.http.delete(f"/jobs/{rows[0]['job_id']}")


def test_a_manual_comes_back_file_for_file(server: Booted, origin: str) -> None:
    pages = some()
    assert len(pages) >= FEWEST
    assert len([page for page in pages if is_odd(page)]) >= 100
    scrape_and_compare(server, origin, pages)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_whole_manual_comes_back_file_for_file(server: Booted, origin: str) -> None:
    _, pages = manual()
    assert len(pages) > 10_000
    for start in range(0, len(pages), BATCH):
        scrape_and_compare(server, origin, pages[start : start + BATCH])
