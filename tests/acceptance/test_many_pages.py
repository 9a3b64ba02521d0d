"""The main job on a site of many pages, fetched directly: a manual comes back file for file."""

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
    ODD,
    find_nginx,
    is_odd,
    nginx,
    spellings,
    standard_library,
    write_manual,
)
from tests.disk import body_bytes, body_files

SOME, ALL = 260, 12_000
BATCH = 2_000
FLAGS = ("--gateway", "direct", "--allow-private")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(tmp_path_factory.mktemp("pages"), *FLAGS) as server:
        yield server


@pytest.fixture(params=["http.server", "nginx"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An origin that serves `tmp_path / "manual"`."""
    root = tmp_path / "manual"
    if request.param == "nginx" and find_nginx() is None:
        pytest.skip("nginx is not installed")
    with ExitStack() as stack:
        serving = nginx(root, tmp_path) if request.param == "nginx" else standard_library(root)
        yield stack.enter_context(serving)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def scrape_and_compare(server: Booted, origin: str, root: Path, pages: list[Path]) -> None:
    """Scrape pages under every spelling of their URLs; hold all that is stored against them."""
    urls = {f"{origin}/{text}": page for page in pages for text in spellings(page)}
    before = set(body_files(server.data_dir))
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
        stored = set(body_files(server.data_dir)) - before
        assert Counter(digest(body_bytes(body)) for body in stored) == Counter(
            digest((root / page).read_bytes()) for page in urls.values()
        )
        caller.http.delete(f"/jobs/{rows[0]['job_id']}")


@pytest.mark.parametrize(
    "count", [SOME, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_a_manual_comes_back_file_for_file(
    server: Booted, origin: str, count: int, tmp_path: Path
) -> None:
    root = tmp_path / "manual"
    pages = write_manual(root, count)
    assert len(set(pages)) == count
    assert len([page for page in pages if is_odd(page)]) > 0.9 * ODD
    for start in range(0, count, BATCH):
        scrape_and_compare(server, origin, root, pages[start : start + BATCH])
