"""Files that are sent whole, and exports that are brought home, as a person does it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import CLIENT, Ran, conveyor
from tests.unit.scripted_server import RUN, Handler, Script, ok

pytestmark = pytest.mark.server

LARGE_FROM = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    data = tmp_path_factory.mktemp("data")
    with conveyor_server(data, async_threshold=LARGE_FROM, max_input_rows=5_000) as booted:
        yield booted


def bodies(directory: Path) -> dict[str, bytes]:
    held = {path.name: path.read_bytes() for path in directory.iterdir()}
    del held["index.html"], held["manifest.jsonl"]
    return held


def rows(server: ConveyorServer, ran: Ran) -> list[str]:
    listed = conveyor(server, "results", ran.job_id, "--jsonl").out
    return [json.loads(row)["url"] for row in listed]


def csv_file(path: Path, urls: list[str], *, compressed: bool = False) -> str:
    """Semicolons, single quotes, a byte order mark, Windows line ends, a line break in a cell."""
    lines = ["note;'the id';link"]
    lines += [f"'line one\r\nline; two {n}';p{n};{url}" for n, url in enumerate(urls)]
    content = ("\ufeff" + "\r\n".join(lines) + "\r\n").encode()
    path.write_bytes(gzip.compress(content) if compressed else content)
    return str(path)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("fields", [("url=2", "external_id=1"), ("url=link", "external_id=the id")])
def test_a_csv_file_is_sent_scraped_and_brought_home(
    server: ConveyorServer, tmp_path: Path, compressed: bool, fields: tuple[str, str]
) -> None:
    urls = [server.url(f"csv/{number}") for number in range(20)]
    name = "list.csv.gz" if compressed else "list.csv"
    listed = csv_file(tmp_path / name, urls, compressed=compressed)
    flags = ["--header", "--delimiter", ";", "--quote", "'", "--out", str(tmp_path / "out")]
    for field in fields:
        flags += ["--field", field]
    ran = conveyor(server, "submit", listed, *flags)
    assert (ran.code, ran.out) == (0, [ran.job_id])
    assert ran.err[0] == f"job {ran.job_id}: 20 tasks accepted"
    assert any(line.startswith("completed: 20 tasks, 20 ok, 0 failed") for line in ran.err)
    assert bodies(tmp_path / "out") == {
        f"p{number}.html": expected_body(url) for number, url in enumerate(urls)
    }


def test_a_large_csv_file_is_followed_while_its_rows_are_written(
    server: ConveyorServer, tmp_path: Path
) -> None:
    urls = [server.url(f"large/{number}") for number in range(1_500)]
    (tmp_path / "large.csv").write_text("id,URL\n" + "".join(f"x,{url}\n" for url in urls))
    ran = conveyor(
        server, "submit", str(tmp_path / "large.csv"), "--header", "--watch", "--max-inflight", "99"
    )
    assert (ran.code, ran.out) == (0, [ran.job_id])
    assert ran.err[0] == f"job {ran.job_id}: 1,500 tasks accepted"
    assert ran.err[1].startswith("ingesting: ")
    assert "/1,500 done" in ran.err[1]
    assert ran.err[-1].startswith("completed: 1,500 tasks, 1,500 ok, 0 failed")
    assert rows(server, ran) == urls


@pytest.mark.parametrize("kind", ["jsonl", "urls"])
def test_lists_can_be_sent_whole_compressed_and_through_a_pipe(
    server: ConveyorServer, tmp_path: Path, kind: str
) -> None:
    urls = [server.url(f"{kind}/{number}") for number in range(30)]
    lines = [json.dumps({"url": url}) for url in urls] if kind == "jsonl" else ["# list", *urls]
    text = "\n".join(lines) + "\n"
    packed = tmp_path / ("l.jsonl.gz" if kind == "jsonl" else "l.txt.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    for ran in (
        conveyor(server, "submit", str(packed), "--watch"),
        conveyor(server, "submit", "-", "--type", kind, "--watch", given=text),
    ):
        assert (ran.code, ran.out) == (0, [ran.job_id])
        assert rows(server, ran) == urls


def test_a_list_of_more_than_4_mib_is_sent_whole(server: ConveyorServer, tmp_path: Path) -> None:
    urls = [f"http://fake.test/{number}/{'x' * 1_950}" for number in range(2_200)]
    listed = tmp_path / "urls.txt"
    listed.write_text("# a comment\n" + "\n".join(urls))
    assert listed.stat().st_size > 4 * 1_024 * 1_024
    ran = conveyor(server, "submit", str(listed), "--max-inflight", "1")
    assert (ran.code, ran.out) == (0, [ran.job_id])
    assert ran.err == [f"job {ran.job_id}: 2,200 tasks accepted"]
    conveyor(server, "rm", ran.job_id)


def test_every_refused_record_is_a_line_and_nothing_is_made(
    server: ConveyorServer, tmp_path: Path
) -> None:
    before = conveyor(server, "jobs", "--jsonl").out
    listed = tmp_path / "bad.csv"
    listed.write_text('name,url\n"a\nb",http://ok.test/\n,ftp://x/\n\nx,\n,http://fine.test/\n')
    ran = conveyor(server, "submit", str(listed), "--header")
    assert (ran.code, ran.out) == (1, [])
    assert [line.split(": ")[:3] for line in ran.err[:2]] == [
        ["conveyor", str(listed), "record 2 at line 4"],
        ["conveyor", str(listed), "record 3 at line 6"],
    ]
    assert len(ran.err) == 3
    assert ran.err[2].startswith("conveyor: 2 of 4 tasks in the file are invalid")
    assert "record 2 at line 4" in ran.err[2]

    listed.write_text('http://a/\n"http://b/\n')
    broken = conveyor(server, "submit", str(listed))
    assert (broken.code, len(broken.err)) == (1, 1)
    assert "record 2, which begins at line 2" in broken.err[0]

    listed.write_text("http://a/\n" * 5_001)
    many = conveyor(server, "submit", str(listed))
    assert (many.code, len(many.err)) == (1, 1)
    assert "5,000" in many.err[0]
    assert conveyor(server, "jobs", "--jsonl").out == before


class Stuck(Handler):
    """Takes no upload to its end."""

    def do_PUT(self) -> None:
        self.rfile.read(1)
        assert isinstance(self.server, StuckServer)
        self.server.begun.set()
        self.server.released.wait(30)
        self.close_connection = True


class StuckServer(Script):
    def __init__(self) -> None:
        super().__init__([ok({})])
        self.RequestHandlerClass = Stuck
        self.begun, self.released = threading.Event(), threading.Event()


@contextmanager
def served(answering: Script) -> Iterator[str]:
    """Serve on a thread; gives the address. The first answer becomes a slot."""
    upload = {"method": "PUT", "url": f"{answering.origin}/slot", "headers": {}}
    answering.answers[0] = ok({"file_input_id": "F", "upload": upload})
    thread = threading.Thread(target=answering.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield answering.origin
    finally:
        answering.shutdown()
        answering.server_close()
        thread.join()


def test_an_interrupted_upload_submits_nothing(tmp_path: Path) -> None:
    listed = tmp_path / "big.csv"
    listed.write_bytes(b"http://a/\n" * 2_000_000)
    stuck = StuckServer()
    with served(stuck) as origin:
        with subprocess.Popen(
            [*CLIENT, "submit", str(listed), "--server", origin],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as sending:
            assert stuck.begun.wait(30)
            sending.send_signal(signal.SIGINT)
            out, err = sending.communicate(timeout=60)
        stuck.released.set()
    assert (sending.returncode, out) == (130, "")
    assert err == "conveyor: interrupted before the job was whole\n"
    assert [told.path for told in stuck.told] == ["/v1/job_inputs"]


def most_memory(origin: str, listed: Path) -> int:
    """The most memory, in bytes, that a submit of the file takes."""
    command = [*CLIENT, "submit", str(listed), "--server", origin]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _pid, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_maxrss * 1_024


def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    small, big = tmp_path / "small.csv", tmp_path / "big.csv"
    small.write_bytes(b"http://a/\n")
    big.write_bytes(b"http://a/\n" * 10_000_000)
    used = []
    for listed in (small, big):
        answering = Script([ok({})])
        with served(answering) as origin:
            accepted = {"job_id": "J", "latest_run": RUN, "accepted_tasks": 1}
            answering.answers += [(200, {}, b""), ok(accepted)]
            used.append(most_memory(origin, listed))
        assert len(answering.told[1].body) == listed.stat().st_size
    assert used[1] - used[0] < 16 * 1_024 * 1_024


def test_an_export_is_made_fetched_and_not_replaced(server: ConveyorServer, tmp_path: Path) -> None:
    urls = [server.url(f"export/{number}") for number in range(10)]
    gone = server.url("export/gone", status=404)
    listed = tmp_path / "l.jsonl"
    tasks = [{"url": url, "external_id": f"e{n}"} for n, url in enumerate([*urls, gone])]
    listed.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    job_id = conveyor(server, "submit", str(listed), "--watch", "--max-attempts", "1").job_id

    out = tmp_path / "out.zip"
    ran = conveyor(server, "export", job_id, "-o", str(out))
    assert (ran.code, ran.err) == (0, [])
    assert ran.out[0].endswith(f" in {out}")
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        held = {name: archive.read(name) for name in archive.namelist()}
    manifest = held.pop("manifest.jsonl").splitlines()
    assert held.pop("index.html").startswith(b"<!doctype html>")
    assert len(manifest) == 11
    assert sorted(held.values()) == sorted(expected_body(url) for url in urls)

    again = conveyor(server, "export", job_id, "-o", str(out))
    assert (again.code, again.out) == (1, [])
    assert again.err == [f"conveyor: {out} already exists (--force replaces it)"]
    assert conveyor(server, "export", job_id, "-o", str(out), "--force").code == 0

    table = tmp_path / "out.jsonl"
    assert conveyor(server, "export", job_id, "-o", str(table)).code == 0
    assert len(table.read_text().splitlines()) == 11
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.jsonl", "out.jsonl", "out.zip"]

    piped = conveyor(server, "export", job_id, "-o", "-", "--format", "jsonl")
    assert (piped.code, piped.err) == (0, [])
    assert piped.out == table.read_text().splitlines()
    for name in ("x.tar", "x.xlsx", "x.zip.gz"):
        refused = conveyor(server, "export", job_id, "-o", str(tmp_path / name))
        assert refused.code == 2
        assert ".zip, .jsonl, .ndjson, .csv or .parquet" in refused.err[-1]
        assert not (tmp_path / name).exists()
    unknown = conveyor(server, "export", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "-o", str(tmp_path / "no"))
    assert unknown.err == ["conveyor: no such job: 01ARZ3NDEKTSV4RRFFQ69G5FAV"]
    no_run = conveyor(server, "export", job_id, "--run", job_id, "-o", str(tmp_path / "no"))
    assert no_run.err == [f"conveyor: job {job_id} has no run {job_id}"]


def test_many_bodies_come_through_one_export_and_only_once(
    server: ConveyorServer, tmp_path: Path
) -> None:
    urls = [server.url(f"many/{number}") for number in range(600)]
    listed, out = tmp_path / "l.jsonl", tmp_path / "out"
    tasks = [{"url": url, "external_id": f"m{n}"} for n, url in enumerate(urls)]
    tasks.append({"url": server.url("many/gone", status=404), "external_id": "gone"})
    listed.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    ran = conveyor(server, "submit", str(listed), "--out", str(out))
    assert (ran.code, ran.out) == (3, [ran.job_id])
    assert ran.err[-1] == f"600 files in {out}"
    assert [line.partition(":")[0] for line in ran.err if "gone" in line] == ["failed"]
    assert bodies(out) == {f"m{n}.html": expected_body(url) for n, url in enumerate(urls)}
    manifest = (out / "manifest.jsonl").read_text()
    rows = list(map(json.loads, manifest.splitlines()))
    assert [row["url"] for row in rows] == [task["url"] for task in tasks]
    assert [row["status"] for row in rows] == [*["successful"] * 600, "failed"]
    assert {row["type"] for row in rows[:-1]} == {"html"}
    assert [row["size"] for row in rows[:-1]] == [len(expected_body(url)) for url in urls]

    # Now only what is missing comes, body by body.
    (out / "m7.html").unlink()
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("m*.html")}
    again = conveyor(server, "results", ran.job_id, "--out", str(out))
    assert (again.code, again.out) == (3, [f"600 files in {out}"])
    assert {name: (out / name).stat().st_mtime_ns for name in written} == written
    assert (out / "m7.html").read_bytes() == expected_body(urls[7])
    assert (out / "manifest.jsonl").read_text() == manifest


def test_bodies_come_one_by_one_where_no_export_is_to_be_had(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data", max_export_bytes=1_000) as limited:
        urls = [limited.url(f"single/{number}") for number in range(500)]
        (tmp_path / "urls.txt").write_text("\n".join(urls))
        ran = conveyor(limited, "submit", str(tmp_path / "urls.txt"), "--out", str(tmp_path / "o"))
    assert ran.code == 0
    assert ran.err[-2:] == [
        "no export to be had, so one by one: the export failed: results are larger than 0 gb",
        f"500 files in {tmp_path / 'o'}",
    ]
    assert sorted(bodies(tmp_path / "o").values()) == sorted(map(expected_body, urls))


def test_an_export_over_the_limit_says_why(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data", max_export_bytes=10) as small:
        job_id = conveyor(small, "submit", small.url("wide", size=100), "--watch").job_id
        ran = conveyor(small, "export", job_id, "-o", str(tmp_path / "out.zip"))
    assert (ran.code, ran.out, len(ran.err)) == (1, [], 1)
    assert ran.err[0].startswith("conveyor: the export failed: results are larger than ")
    assert not (tmp_path / "out.zip").exists()
