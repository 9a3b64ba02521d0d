"""Bodies come back as the target sent them, byte for byte, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import brotli
import pytest
from zenrows.batch import ZenRowsBatchClient

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import KEY, Caller, Json, problem_of
from tests.acceptance.support_site import Page, Site, serving_site

LIMIT = 25_000_000
LARGE_LIMIT = 210_000_000
LARGE = 200_000_000
MEMORY_GROWTH = 64_000_000
MEGABYTE = bytes(1_000_000)

JAPANESE = "<title>日本語のページ</title><p>表示テスト：ソ能十</p>".encode("shift_jis")
RUSSIAN = "<title>Съешь же ещё этих мягких булок</title>".encode("windows-1251")
PDF = (
    b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
)
TWENTY_MEGABYTES = hashlib.shake_256(b"twenty").digest(20_000_000)

BODIES: dict[str, tuple[bytes, str | None]] = {
    "shift_jis": (JAPANESE, "text/html; charset=Shift_JIS"),
    "windows-1251": (RUSSIAN, 'text/html;charset="windows-1251"'),
    "invalid-utf-8": (b"caf\xe9 \xff\xfe \xc3( \xed\xa0\x80", "text/html; charset=utf-8"),
    "nul": (b"\0before\0\0after\0", "text/plain"),
    "byte-order-mark": (b"\xef\xbb\xbf<p>\r\n\r</p>\n", "text/html"),
    "every-byte": (bytes(range(256)) * 5, "application/x-thing; a=b; charset=utf-16le"),
    "empty": (b"", "text/html; charset=utf-8"),
    "one-byte": (b"\n", "text/html"),
    "pdf": (PDF, "application/pdf"),
    "gzip-file": (gzip.compress(RUSSIAN), "application/gzip"),
    "gzip-inside-gzip-file": (gzip.compress(gzip.compress(JAPANESE)), "application/gzip"),
    "chunk-like": (b"5\r\nhello\r\n0\r\n\r\n", "text/plain; charset=us-ascii"),
    "no-type": (b"<p>untold</p>", None),
    "border": (TWENTY_MEGABYTES[:262_145], "application/octet-stream"),
}


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


def quick_brotli(body: bytes) -> bytes:
    return brotli.compress(body, quality=1)  # type: ignore[no-any-return]


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": lambda body: gzip.compress(body, 1),
    "br": quick_brotli,
    "deflate": zlib.compress,
    "deflate (raw)": raw_deflate,
    "gzip, gzip": lambda body: gzip.compress(gzip.compress(body, 1), 1),
    "gzip, br": lambda body: quick_brotli(gzip.compress(body, 1)),
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving_site() as site:
        yield site


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("bytes")
    with boot(
        directory,
        *("--gateway", "direct", "--allow-private"),
        max_result_bytes=LIMIT,
        retry_base=0.01,
        retry_cap=0.02,
    ) as server:
        yield server


@pytest.fixture
def caller(server: Booted) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller


def put_bodies(site: Site, codings: list[str]) -> dict[str, tuple[bytes, str | None]]:
    """Put every body in these codings on the site, with and without its length; return the bodies
    by URL."""
    put: dict[str, tuple[bytes, str | None]] = {}
    for name, (body, content_type) in BODIES.items():
        for number, coding in enumerate(codings):
            wire = CODINGS[coding](body)
            for chunked in (False, True):
                page = Page(wire, content_type, coding.removesuffix(" (raw)"), chunked=chunked)
                put[site.put(f"/{name}/{len(codings)}-{number}-{chunked}", page)] = BODIES[name]
    return put


def put_twenty_megabytes(site: Site) -> dict[str, tuple[bytes, str | None]]:
    """The large body, whole and encoded."""
    large = (TWENTY_MEGABYTES, "video/mp4; codecs=none")
    pages = {
        "/large/plain": Page(large[0], large[1]),
        "/large/gzip": Page(CODINGS["gzip"](large[0]), large[1], "gzip", chunked=True),
    }
    return {site.put(path, page): large for path, page in pages.items()}


@pytest.mark.guarantee("G11")
def test_content_and_link_are_what_was_served(caller: Caller, site: Site) -> None:
    served = put_bodies(site, list(CODINGS)) | put_twenty_megabytes(site)
    rows = caller.scraped(*served)

    assert [row["url"] for row in rows] == list(served)
    with Caller(site.origin, key=None) as anyone:
        for row, (body, told) in zip(rows, served.values(), strict=True):
            for response in (caller.content(row), anyone.http.get(row["result_url"])):
                assert response.status_code == 200
                assert same(response.content, body), row["url"]
                content_type = told or "application/octet-stream"
                assert response.headers["Content-Type"] == content_type, row["url"]
                assert response.headers["Content-Length"] == str(len(body))
                assert "Content-Encoding" not in response.headers


def test_every_download_is_what_was_served(
    server: Booted, caller: Caller, site: Site, tmp_path: Path
) -> None:
    served = put_bodies(site, ["gzip"]) | put_twenty_megabytes(site)
    rows = caller.scraped(*({"url": url, "external_id": f"n{n}"} for n, url in enumerate(served)))
    job_id = rows[0]["job_id"]
    command_line_download(server, job_id, tmp_path / "command-line")
    with ZenRowsBatchClient(KEY, base_url=server.api) as client:
        run = client.job(job_id).run
        run.download_to_dir(tmp_path / "client", use_external_id=True, concurrency=4)
        kept = {row.external_id: row for row in run.download_to_memory(concurrency=4)}

    files = {path.name: path for path in (tmp_path / "command-line").iterdir()}
    del files["index.html"], files["manifest.jsonl"]
    by_digest = sorted(digest(path.read_bytes()) for path in files.values())
    assert by_digest == sorted(digest(body) for body, _ in served.values())
    assert len(list((tmp_path / "client").iterdir())) == len(kept) == len(served)
    for number, (body, told) in enumerate(served.values()):
        in_memory = kept[f"n{number}"]
        assert in_memory.content_type == (told or "application/octet-stream")
        assert same(in_memory.body, body), rows[number]["url"]
        on_disk = (tmp_path / "client" / f"n{number}.html").read_bytes()
        assert same(on_disk, body), rows[number]["url"]


def same(got: bytes, body: bytes) -> bool:
    """Compare two bodies: a failing assertion must not print twenty megabytes."""
    return got == body


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def command_line_download(server: Booted, job_id: str, directory: Path) -> None:
    """Return the files that `conveyor results JOB --out DIR` writes."""
    environment = {**os.environ, "CONVEYOR_URL": server.api, "ZENROWS_API_KEY": KEY}
    subprocess.run(
        [sys.executable, "-m", "conveyor", "results", job_id, "--out", str(directory)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=60,
    )


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


BROKEN: dict[str, Callable[[bytes], Page]] = {
    "truncated gzip": lambda body: Page(cut(gzip.compress(body)), coding="gzip"),
    "gzip without its checksum": lambda body: Page(gzip.compress(body)[:-8], coding="gzip"),
    "gzip with another checksum": lambda body: Page(
        gzip.compress(body)[:-8] + bytes(8), coding="gzip"
    ),
    "truncated gzip in chunks": lambda body: Page(
        cut(gzip.compress(body)), coding="gzip", chunked=True
    ),
    "truncated gzip inside gzip": lambda body: Page(
        gzip.compress(cut(gzip.compress(body))), coding="gzip, gzip"
    ),
    "truncated brotli": lambda body: Page(cut(quick_brotli(body)), coding="br"),
    "truncated deflate": lambda body: Page(cut(zlib.compress(body)), coding="deflate"),
    "no gzip at all": lambda body: Page(body, coding="gzip"),
    "shorter than its length": lambda body: Page(body, announced=len(body) + 1),
    "none of its length": lambda body: Page(b"", announced=len(body)),
    "gzip shorter than its length": lambda body: Page(
        gzip.compress(body), coding="gzip", announced=len(gzip.compress(body)) + 10
    ),
    "chunks without an end": lambda body: Page(body, chunked=True, breaks=True),
}


@pytest.mark.guarantee("G11")
def test_broken_bodies_are_retried_then_failed_and_nothing_is_stored(
    server: Booted, caller: Caller, site: Site
) -> None:
    small, large = TWENTY_MEGABYTES[:5_000], TWENTY_MEGABYTES[:3_000_000]
    urls = {
        site.put(f"/broken/{number}-{len(body)}", spoil(body)): kind
        for number, (kind, spoil) in enumerate(BROKEN.items())
        for body in (small, large)
    }
    before = server.files()
    job = caller.submit(*urls, max_attempts=3)
    run = caller.wait(job)

    assert run["stats"]["failed"] == run["stats"]["total"] == len(urls)
    assert run["stats"]["failure_reasons"] == {"gateway_error": len(urls)}
    for row in caller.results(job):
        kind = urls[row["url"]]
        row["job_id"] = job["job_id"]
        assert (row["status"], "result_url" in row) == ("failed", False), kind
        assert site.hits[row["url"].removeprefix(site.origin)] == 3, kind
        events = caller.history(row)
        assert [event["attempt"] for event in events] == [1, 2, 3], kind
        assert all(event["error"] == row["error"] for event in events), kind
        assert row["error"]["code"] in ("truncated_body", "corrupt_body", "connection_lost"), kind
        assert row["error"]["status"] == 502
        content = caller.content(row)
        assert (content.status_code, content.json()) == (422, row["error"])
    assert server.files() == before


def test_a_body_that_is_whole_at_the_second_attempt_is_stored_once(
    server: Booted, caller: Caller, site: Site
) -> None:
    body = TWENTY_MEGABYTES[:1_000_000]
    turns = iter([cut(body), body])
    url = site.put("/second", Page(lambda: [next(turns)], announced=len(body)))
    before = set(server.files())
    [row] = caller.scraped(url)

    assert row["status"] == "successful"
    assert same(caller.content(row).content, body)
    assert ["error" in event for event in caller.history(row)] == [True, False]
    [stored] = set(server.files()) - before
    assert same(stored.read_bytes(), body)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("coding", ["", "gzip", "br", "deflate", "gzip, gzip"])
def test_the_limit_is_exact(
    server: Booted, caller: Caller, site: Site, coding: str, chunked: bool
) -> None:
    encode = CODINGS[coding]
    name = coding.replace(", ", "+") or "plain"
    pages = {
        size: Page(encode(bytes(size)), coding=coding, chunked=chunked)
        for size in (LIMIT, LIMIT + 1)
    }
    urls = [site.put(f"/limit/{name}/{chunked}/{size}", page) for size, page in pages.items()]
    before = set(server.files())
    fits, exceeds = caller.scraped(*urls)

    assert (fits["status"], exceeds["status"]) == ("successful", "failed")
    assert len(caller.content(fits).content) == LIMIT
    problem = exceeds["error"]
    assert (problem["code"], problem["status"]) == ("result_too_large", 422)
    run = caller.get(f"/jobs/{exceeds['job_id']}")["latest_run"]
    assert run["stats"]["failure_reasons"] == {"bad_target": 1}
    assert len(caller.history(exceeds)) == site.hits[urls[1].removeprefix(site.origin)] == 1
    [stored] = set(server.files()) - before
    assert stored.stat().st_size == LIMIT
    delete(caller, fits)


def delete(caller: Caller, row: Json) -> None:
    """Drop a job whose bodies would only fill the disk."""
    assert caller.http.delete(f"/jobs/{row['job_id']}").status_code == 202
    problem_of(caller.content(row), status=404, code="not_found")


def megabytes(count: int) -> Callable[[], Iterator[bytes]]:
    return lambda: (MEGABYTE for _ in range(count))


def bomb(unfolded: int) -> bytes:
    """A gzip stream of so many zeros: one member for each ten megabytes, all alike."""
    return gzip.compress(bytes(10_000_000)) * (unfolded // 10_000_000)


@pytest.mark.guarantee("G18")
def test_memory_stays_flat_over_large_bodies_and_bombs(tmp_path: Path, site: Site) -> None:
    pages = {
        "streamed": Page(megabytes(LARGE // 1_000_000), chunked=True),
        "unfolded": Page(bomb(LARGE), coding="gzip"),
        "a bomb": Page(bomb(2 * LARGE_LIMIT), coding="gzip"),
        "a bomb in a bomb": Page(gzip.compress(bomb(40 * LARGE_LIMIT)), coding="gzip, gzip"),
    }
    urls = [site.put(f"/heavy/{number}", page) for number, page in enumerate(pages.values())]
    flags = ("--gateway", "direct", "--allow-private")
    with boot(tmp_path, *flags, max_result_bytes=LARGE_LIMIT) as server, Caller(server.api) as him:
        him.scraped(site.put("/warm", Page(b"warm")))
        before = server.memory("VmRSS")
        rows = him.scraped(*urls)
        statuses = [row["status"] for row in rows]
        sizes = [read_through(him, row) for row in rows[:2]]
        growth = server.memory("VmHWM") - before
        files = [path for path in server.files() if path.parent.name != "segments"]
        stored = sorted(path.stat().st_size for path in files)
    shutil.rmtree(server.data_dir)

    assert statuses == ["successful"] * 2 + ["failed"] * 2
    assert [row["error"]["code"] for row in rows[2:]] == ["result_too_large"] * 2
    assert sizes == [LARGE] * 2
    assert stored == sizes
    assert growth < MEMORY_GROWTH


def read_through(caller: Caller, row: Json) -> int:
    """The length of a body, which is never held as a whole."""
    with caller.http.stream("GET", caller.task_path(row, "content")) as response:
        return sum(len(piece) for piece in response.iter_bytes())
