"""`conveyor run`: from a list to a directory without a server, and nothing left beside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from conveyor.gateway.fake import expected_body
from tests.acceptance.support_cli import CLIENT, Ran
from tests.acceptance.support_site import Page, serving_site
from tests.acceptance.support_wire import eventually

pytestmark = pytest.mark.server

BARE = {
    name: text
    for name, text in os.environ.items()
    if not name.startswith("CONVEYOR_") and not name.lower().endswith("_proxy")
}


def run(*arguments: object, given: str = "", **variables: str) -> Ran:
    return Ran(
        subprocess.run(
            [*CLIENT, "run", *map(str, arguments)],
            env={**BARE, **variables},
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    )


LISTS = {"index.html", "manifest.jsonl"}


def names(directory: Path) -> list[str]:
    """The names in a directory, but for the lists of its files."""
    return sorted({path.name for path in directory.iterdir()} - LISTS)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(number) for number in found.split()]


def test_a_list_becomes_files_and_nothing_else(tmp_path: Path) -> None:
    urls = [f"http://fake.test/run/{number}" for number in range(20)]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    out = tmp_path / "new" / "out"
    ran = run(tmp_path / "urls.txt", "-o", out, "--gateway", "fake")
    assert (ran.code, ran.err) == (0, [])
    assert ran.out[0] == f"job {ran.job_id}: 20 tasks accepted"
    assert any(line.startswith("completed: 20 tasks, 20 ok, 0 failed") for line in ran.out)
    assert ran.out[-1] == f"20 files in {out}"
    assert [(out / name).read_bytes() for name in names(out)] == [
        expected_body(url) for url in urls
    ]


def test_a_csv_file_is_larger_than_a_server_would_take_by_default(tmp_path: Path) -> None:
    lines = "".join(f"r{number},http://fake.test/run/{number}\n" for number in range(300))
    (tmp_path / "l.csv").write_text(lines)
    flags = ("--field", "url=1", "--field", "external_id=0", "--gateway", "fake")
    ran = run(tmp_path / "l.csv", *flags, "-o", tmp_path / "out", CONVEYOR_MAX_INPUT_ROWS="10")
    assert (ran.code, ran.err) == (0, [])
    assert names(tmp_path / "out") == sorted(f"r{number}.html" for number in range(300))


def test_real_pages_are_fetched_where_private_addresses_are_allowed(tmp_path: Path) -> None:
    with serving_site() as site:
        url = site.put("/page", Page(b"a page"))
        ran = run(url, "-o", tmp_path / "out", "--allow-private")
        assert (ran.code, ran.err) == (0, [])
        assert [(tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")] == [
            b"a page"
        ]
        refused = run(url, "-o", tmp_path / "no")
        assert refused.code == 3
        (line,) = refused.err
        assert "(address_refused)" in line
        assert line.endswith("--allow-private fetches private addresses too")
        assert site.hits["/page"] == 1
    assert names(tmp_path / "no") == []


def test_failed_tasks_make_the_exit_code_3_and_no_command_is_named(tmp_path: Path) -> None:
    urls = [f"http://fake.test/{number}?status=404" for number in range(7)]
    ran = run("http://fake.test/ok", *urls, "-o", tmp_path, "--gateway", "fake")
    assert ran.code == 3
    assert ran.err == [
        "failed: 7 tasks: Scripted 404 (fake_404), first http://fake.test/0?status=404",
        f"all of them: {tmp_path}/manifest.jsonl",
    ]
    assert ran.out[-1] == f"1 file in {tmp_path}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gopher://x/"], "gopher://x/: URL must start with http:// or https://"),
        (
            ["{tmp}/bad.csv"],
            "record 1 at line 1: x: URL must start with http:// or https://",
        ),
        (["http://a/", "--max-inflight", "0"], "max_inflight"),
    ],
)
def test_what_is_refused_is_told_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.csv").write_text("x\n")
    chosen = [argument.format(tmp=tmp_path) for argument in arguments]
    ran = run(*chosen, "-o", tmp_path / "out", "--gateway", "fake")
    assert (ran.code, ran.out) == (1, [])
    assert message in ran.err[0]
    assert names(tmp_path / "out") == []


def test_a_data_directory_is_kept_and_can_be_served(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--gateway", "fake", "--data-dir", data)
    first = run("http://fake.test/a", "-o", tmp_path / "out", *flags)
    second = run("-", "-o", tmp_path / "two", *flags, given='{"url": "http://fake.test/b"}\n')
    assert (first.code, second.code) == (0, 0)
    assert first.job_id != second.job_id
    assert len(names(tmp_path / "out")) == len(names(tmp_path / "two")) == 1
    assert "conveyor.db" in names(data)


@pytest.mark.extended
@pytest.mark.slow
def test_the_same_command_again_is_refused_and_by_force_replaces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tasks = '{"url": "http://fake.test/a"}\n{"url": "http://fake.test/b", "external_id": "b"}\n'
    first = run("-", "-o", out, "--gateway", "fake", given=tasks)
    held = {name: (out / name).read_bytes() for name in [*names(out), *LISTS]}
    again = run("-", "-o", out, "--gateway", "fake", given=tasks)
    assert (again.code, again.out) == (1, [])
    assert again.err == [
        f"conveyor: {out} holds the results of job {first.job_id}: name another directory, or "
        "replace them with --force"
    ]
    assert {name: (out / name).read_bytes() for name in [*names(out), *LISTS]} == held
    (out / "notes.txt").write_text("mine")
    forced = run("http://fake.test/a", "-o", out, "--gateway", "fake", "--force")
    assert (forced.code, forced.err) == (0, [])
    (row,) = map(json.loads, (out / "manifest.jsonl").read_text().splitlines())
    assert row["job_id"] == forced.job_id
    assert names(out) == sorted([row["file"], "notes.txt"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_leaves_nothing_else(
    tmp_path: Path, number: signal.Signals
) -> None:
    quick = [{"url": f"http://fake.test/{n}", "external_id": f"q{n}"} for n in range(5)]
    slow = [{"url": f"http://fake.test/{n}?delay=600"} for n in range(5)]
    listed = tmp_path / "l.jsonl"
    listed.write_text("".join(json.dumps(task) + "\n" for task in [*quick, *slow]))
    out = tmp_path / "out"
    with subprocess.Popen(
        [*CLIENT, "run", str(listed), "-o", str(out), "--gateway", "fake"],
        env=BARE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        lines: list[str] = []
        while not (lines and "5/10 done" in lines[-1]):
            lines.append(running.stdout.readline())
            assert lines[-1], lines
        assert len(list(out.glob(".conveyor-run-*"))) == 1
        family = children(running.pid)
        running.send_signal(number)
        rest, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "stopped: 10 tasks, 5 ok, 0 failed, 5 not done" in rest.splitlines()
    assert rest.splitlines()[-1] == f"5 files in {out}"
    assert err.splitlines() == [
        "stopping and saving the results so far; interrupt again to quit at once",
        "conveyor: interrupted; the results so far are kept",
    ]
    assert names(out) == [f"q{n}.html" for n in range(5)]
    rows = list(map(json.loads, (out / "manifest.jsonl").read_text().splitlines()))
    assert [row.get("file") for row in rows] == [*names(out), *[None] * 5]
    assert {row["status"] for row in rows[5:]} <= {"pending", "processing"}
    eventually(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in family) or None, "all are gone"
    )
