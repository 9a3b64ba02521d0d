"""The commands as a person runs them: processes against a real server."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import (
    CLIENT,
    conveyor,
    environment,
)
from tests.acceptance.support_wire import eventually

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def test_a_file_of_urls_is_scraped_and_brought_home(server: ConveyorServer, tmp_path: Path) -> None:
    urls = [server.url(f"page{number}", size=10 + number) for number in range(20)]
    listed = tmp_path / "urls.txt"
    listed.write_text("# pages\r\n\r\n" + "\r\n".join(urls), encoding="utf-8-sig")
    ran = conveyor(server, "submit", str(listed), "--watch", "--out", str(tmp_path / "out"))
    assert (ran.code, ran.out) == (0, [ran.job_id])
    assert ran.err[0] == f"job {ran.job_id}: 20 tasks accepted"
    assert any(line.startswith("completed: 20 tasks, 20 ok, 0 failed") for line in ran.err)
    assert ran.err[-1] == f"20 files in {tmp_path / 'out'}"
    # Files are named by task id, which sorts in submission order.
    files = sorted((tmp_path / "out").glob("0*"))
    assert [file.read_bytes() for file in files] == [expected_body(url) for url in urls]
    assert {file.suffix for file in files} == {".html"}


def test_json_tasks_come_through_a_pipe_and_name_their_files(
    server: ConveyorServer, tmp_path: Path
) -> None:
    tasks = [
        {"url": server.url("a"), "external_id": "NUL"},
        {"url": server.url("b", type="text/csv"), "external_id": "table.csv"},
        {"url": server.url("c"), "external_id": "..", "zenrows_params": {"js_render": True}},
        {"url": server.url("d"), "external_id": "nul"},
    ]
    lines = "\n".join(json.dumps(task) for task in tasks)
    ran = conveyor(server, "submit", "-", "--out", str(tmp_path / "out"), given=lines)
    assert (ran.code, ran.out) == (0, [ran.job_id])
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "_.html",
        "_NUL.html",
        "_nul-2.html",
        "index.html",
        "manifest.jsonl",
        "table.csv",
    ]


def test_a_failed_task_is_told_rerun_and_makes_the_exit_code_3(server: ConveyorServer) -> None:
    good = server.url("good")
    ran = conveyor(
        server, "submit", good, server.url("gone", status=404), "--watch", "--max-attempts", "1"
    )
    assert ran.code == 3
    assert any(
        line.startswith("completed: 2 tasks, 1 ok, 1 failed (bad_target 1)") for line in ran.err
    )
    assert ran.err[-1].startswith("failed: http://fake.test/gone?status=404: ")
    assert len([line for line in ran.err if line.startswith("failed: ")]) == 1

    listed = conveyor(server, "results", ran.job_id)
    assert (listed.code, len(listed.out), len(listed.err)) == (3, 3, 1)
    assert listed.out[0].split() == ["status", "ended,", "UTC", "size", "id", "url,", "reason"]
    assert listed.err == ran.err[-1:]
    succeeded = conveyor(server, "results", ran.job_id, "--status", "successful", "--jsonl")
    assert succeeded.code == 0
    assert [json.loads(line)["url"] for line in succeeded.out] == [good]

    again = conveyor(server, "rerun", ran.job_id, "--failed", "--watch")
    assert again.code == 3
    assert again.out[0] == f"job {ran.job_id}: 1 task to run again, 1 kept"
    assert server.hits.counts[good] == 1
    assert conveyor(server, "rerun", ran.job_id).code == 0
    server.drain(timeout=60)
    assert server.hits.counts[good] == 2


def test_every_refused_task_is_named_by_its_line_and_nothing_is_made(
    server: ConveyorServer, tmp_path: Path
) -> None:
    before = conveyor(server, "jobs", "--jsonl").out
    listed = tmp_path / "list"
    listed.write_text('http://ok.test/\n#\nftp://x/\n{"url": "http://y/", "external_id": "a b"}\n')
    ran = conveyor(server, "submit", str(listed), "http://")
    assert (ran.code, ran.out) == (1, [])
    assert [line.split(": ")[:2] for line in ran.err[:3]] == [
        ["conveyor", f"{listed}:3"],
        ["conveyor", f"{listed}:4"],
        ["conveyor", "http://"],
    ]
    assert "URL must start with http:// or https://" in ran.err[0]
    assert ran.err[3:] == ["conveyor: 3 tasks refused, nothing submitted"]
    assert conveyor(server, "jobs", "--jsonl").out == before


@pytest.mark.parametrize("number", [3, 11_000])
def test_bad_tasks_are_left_out_and_told_where_that_is_asked_for(
    server: ConveyorServer, tmp_path: Path, number: int
) -> None:
    listed = tmp_path / "list"
    good = [f"http://fake.test/left/{number}/{index}" for index in range(number)]
    bad = ["[1]", f"{good[0]}, {good[1]}", '{"url": "ftp://x/", "extid": "z"}']
    listed.write_text("\n".join([*bad, *good]))

    ran = conveyor(server, "submit", str(listed), "--skip-invalid", "--max-inflight", "1000")

    assert ran.code == 0, ran.err
    assert ran.out == [ran.job_id]
    assert ran.err[-1] == f"job {ran.job_id}: {number:,} tasks accepted, 3 skipped"
    left = [line for line in ran.err if line.startswith("skipped")]
    assert left[0].startswith(f"skipped {listed}:1: a list")
    assert left[1].startswith(f"skipped {listed}:2: {good[0]}, {good[1]}: more than one URL")
    assert left[2].startswith(f"skipped {listed}:3: ftp://x/: URL must start with")
    rows = conveyor(server, "results", ran.job_id, "--jsonl").out
    assert [json.loads(row)["url"] for row in rows] == good


def test_a_field_that_nobody_reads_is_a_warning(server: ConveyorServer, tmp_path: Path) -> None:
    listed = tmp_path / "tasks.jsonl"
    listed.write_text('{"url": "http://fake.test/warned", "extid": "z"}\n')
    said = [
        'warning: "extid" is no field of a task and was ignored (at index 0): did you mean '
        '"external_id"?'
    ]

    ran = conveyor(server, "submit", str(listed))
    whole = conveyor(server, "submit", str(listed), "--type", "jsonl")

    assert (ran.code, ran.err[:-1]) == (0, said)
    assert (whole.code, whole.err[:-1]) == (0, [said[0].replace("at index 0", "on line 1")])


def test_twelve_thousand_tasks_are_one_job(server: ConveyorServer, tmp_path: Path) -> None:
    listed = tmp_path / "many"
    listed.write_text("".join(f"http://fake.test/many/{number}\n" for number in range(12_000)))
    flags = ("--watch", "--max-inflight", "1000", "--idempotency-key", "many")
    ran = conveyor(server, "submit", str(listed), *flags)
    assert ran.code == 0, ran.err
    assert ran.out == [ran.job_id]
    assert f"job {ran.job_id}: 12,000 tasks accepted" in ran.err
    assert "completed: 12,000 tasks, 12,000 ok, 0 failed" in ran.err[-1]
    rows = conveyor(server, "results", ran.job_id, "--jsonl").out
    assert [json.loads(row)["url"] for row in rows] == listed.read_text().splitlines()

    again = conveyor(server, "submit", str(listed), *flags)
    assert (again.code, again.job_id) == (0, ran.job_id)
    assert sum(url.startswith("http://fake.test/many/") for url in server.hits.counts) == 12_000
    assert all(server.hits.counts[f"http://fake.test/many/{n}"] == 1 for n in range(12_000))


def test_a_bad_task_in_a_later_batch_leaves_no_job_and_no_scrape(
    server: ConveyorServer, tmp_path: Path
) -> None:
    listed = tmp_path / "many"
    lines = [f"http://fake.test/undone/{number}" for number in range(11_000)]
    lines[10_500] = "gopher://x/"
    listed.write_text("\n".join(lines))
    ran = conveyor(server, "submit", str(listed), "--name", "undone")
    assert (ran.code, ran.out) == (1, [])
    reason = "URL must start with http:// or https://"
    assert f"conveyor: {listed}:10501: gopher://x/: {reason}" in ran.err
    assert "undone" not in "\n".join(conveyor(server, "jobs").out)
    assert not [url for url in server.hits.counts if "/undone/" in url]


def test_a_task_that_waits_says_why_and_until_when(server: ConveyorServer) -> None:
    url = server.url("waits", status=503, retry_after=600)
    job_id = conveyor(server, "submit", url).job_id

    def waiting() -> str | None:
        _, line = conveyor(server, "results", job_id).out
        return line if "until" in line else None

    line = eventually(waiting, "the task waits")
    assert re.search(
        r"^pending .*  retry_after, waits until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", line
    )
    [told] = conveyor(server, "results", job_id, "--jsonl").out
    assert json.loads(told)["waiting"].keys() == {"reason", "until"}
    assert conveyor(server, "rm", job_id).code == 0
    watched = conveyor(server, "watch", job_id)
    assert (watched.code, watched.out) == (1, [])
    assert watched.err == [f"conveyor: job {job_id} is deleted"]


def test_pause_resume_stop_and_rm(server: ConveyorServer) -> None:
    urls = [server.url(f"slow{number}", delay=600) for number in range(3)]
    job_id = conveyor(server, "submit", *urls, "--name", "slow", "--max-inflight", "1").job_id
    assert conveyor(server, "pause", job_id).out == [f"job {job_id}: paused, 0/3 done"]
    listed = [line for line in conveyor(server, "jobs").out if line.startswith(job_id)]
    assert "paused" in listed[0]
    assert listed[0].endswith("slow")
    assert conveyor(server, "resume", job_id).out == [f"job {job_id}: running, 0/3 done"]
    assert conveyor(server, "stop", job_id).out == [f"job {job_id}: stopped, 0/3 done"]
    refused = conveyor(server, "pause", job_id)
    assert (refused.code, len(refused.err)) == (1, 1)
    assert conveyor(server, "rm", job_id).out == [f"job {job_id}: deleted"]
    gone = conveyor(server, "watch", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert (gone.code, gone.out, len(gone.err)) == (1, [], 1)


def test_a_paused_run_says_so_and_an_interrupted_watch_tells_how_to_come_back(
    server: ConveyorServer,
) -> None:
    job_id = conveyor(server, "submit", server.url("nap", delay=600)).job_id
    conveyor(server, "pause", job_id)
    with subprocess.Popen(
        [*CLIENT, "watch", job_id],
        env=environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        line = watching.stdout.readline()
        assert line.startswith("paused: 0/1 done")
        assert f"conveyor resume {job_id}" in line
        watching.send_signal(signal.SIGINT)
        _out, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert err.splitlines() == [
        f"conveyor: interrupted; the job goes on. Come back with: conveyor watch {job_id}"
    ]
    conveyor(server, "rm", job_id)


def test_a_reader_that_leaves_ends_a_command_quietly(server: ConveyorServer) -> None:
    conveyor(server, "submit", server.url("one"), "--watch")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        left = subprocess.run(
            [*CLIENT, "jobs"],
            env=environment(server),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (left.returncode, left.stderr) == (1, b"")


def test_another_key_sees_nothing(server: ConveyorServer) -> None:
    job_id = conveyor(server, "submit", server.url("mine"), "--watch").job_id
    assert conveyor(server, "jobs", "--api-key", "other").out == []
    other = conveyor(server, "results", job_id, "--api-key", "other")
    assert (other.code, other.out, len(other.err)) == (1, [], 1)


def test_passwords_in_urls_are_not_printed(server: ConveyorServer) -> None:
    job_id = conveyor(
        server, "submit", "http://user:s3cret@fake.test/?status=404", "--watch"
    ).job_id
    for arguments in (["results", job_id], ["results", job_id, "--jsonl"], ["watch", job_id]):
        ran = conveyor(server, *arguments)
        shown = "\n".join(ran.out + ran.err)
        assert "http://***@fake.test/" in shown
        assert "s3cret" not in shown


def test_a_terminal_gets_a_bar(server: ConveyorServer) -> None:
    mine, theirs = pty.openpty()
    urls = [server.url(f"bar{number}", delay=0.2) for number in range(10)]
    with subprocess.Popen(
        [*CLIENT, "submit", *urls, "--watch", "--max-inflight", "2"],
        env=environment(server, TERM="xterm-256color", COLUMNS="100"),
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
    ) as watching:
        os.close(theirs)
        shown = read_all(mine)
    assert watching.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "━" in plain
    assert re.search(r"running.*\d ok.*0 failed.*/s \d:\d\d:\d\d", plain)
    assert "10/10" in plain
    assert plain.rstrip().splitlines()[-1].startswith("completed: 10 tasks, 10 ok")


def read_all(descriptor: int) -> str:
    shown = b""
    try:
        while piece := os.read(descriptor, 65_536):
            shown += piece
    except OSError:
        pass  # The other side of a terminal is gone.
    finally:
        os.close(descriptor)
    return shown.decode()
