"""The jobs of the command line: named shortly, changed, deleted, run again, and given as JSON."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest

from conveyor.cli import conveyor as program
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import CLIENT, JOB_ID, Ran, conveyor, environment, lines_until
from tests.acceptance.support_held import held_server
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]

UNKNOWN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def submitted(server: ConveyorServer, *arguments: str) -> str:
    ran = conveyor(server, "submit", *arguments)
    assert ran.code in (0, 3), ran.err
    return ran.job_id


def objects(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.out]


def test_a_pipe_gets_the_id_alone(server: ConveyorServer) -> None:
    ran = conveyor(server, "submit", server.url("piped"))
    assert JOB_ID.fullmatch(ran.out[0])
    assert (ran.code, len(ran.out)) == (0, 1)
    assert ran.err == [f"job {ran.out[0]}: 1 task accepted"]


def test_a_job_is_named_by_the_beginning_of_its_id_and_as_the_last(server: ConveyorServer) -> None:
    older = submitted(server, server.url("older"), "--watch")
    newer = submitted(server, server.url("newer"), "--watch")
    for word in (newer, newer[:-1], newer[:-1].lower(), "last"):
        row = json.loads(conveyor(server, "results", word, "--json").out[0])
        assert row["url"] == server.url("newer")

    several = conveyor(server, "stop", "0")
    assert (several.code, several.out, len(several.err)) == (1, [], 1)
    assert several.err[0].startswith(
        f"conveyor: 0 begins the ids of several jobs: {newer}, {older}"
    )
    none = conveyor(server, "watch", "7ZZ")
    assert (none.code, none.err) == (1, ["conveyor: no such job: 7ZZ"])
    other = conveyor(server, "watch", "last", "--api-key", "of-nobody")
    assert (other.code, other.err) == (1, ["conveyor: no jobs yet: conveyor submit URL"])


def test_a_job_that_is_not_there_cannot_be_deleted(server: ConveyorServer) -> None:
    job_id = submitted(server, server.url("to-delete"), "--watch")
    assert conveyor(server, "rm", job_id).out == [f"job {job_id}: deleted"]
    for absent in (job_id, UNKNOWN):
        ran = conveyor(server, "rm", absent, "--yes")
        assert (ran.code, ran.out, ran.err) == (1, [], [f"conveyor: no such job: {absent}"])


def test_rm_asks_on_a_terminal(server: ConveyorServer) -> None:
    job_id = submitted(server, server.url("kept"), "--watch", "--name", "my pages")
    code, shown = at_terminal(server, ["rm", "last"], b"n\r")
    assert code == 1
    assert job_id in shown
    assert "my pages" in shown
    assert "nothing was deleted" in shown
    assert conveyor(server, "results", job_id).code == 0

    assert at_terminal(server, ["rm", job_id], b"")[0] == 130
    assert conveyor(server, "results", job_id).code == 0

    code, shown = at_terminal(server, ["rm", job_id[:-1]], b"y\r")
    assert (code, f"job {job_id}: deleted" in shown) == (0, True)

    unasked = submitted(server, server.url("unasked"), "--watch")
    code, shown = at_terminal(server, ["rm", unasked, "--yes"], b"")
    assert (code, shown.split("\r\n")[0]) == (0, f"job {unasked}: deleted")


RETRY_SECONDS = 10.0
"""After which a program that does not end is interrupted once more: long enough for its end."""


def at_terminal(server: ConveyorServer, arguments: list[str], answer: bytes) -> tuple[int, str]:
    """Run a command at a terminal, and answer its question, or interrupt it there with no answer;
    its exit code, and what was shown."""
    mine, theirs = pty.openpty()
    shown = b""
    is_asked = False
    with subprocess.Popen(
        [*CLIENT, *arguments],
        env=environment(server),
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
    ) as asking:
        os.close(theirs)
        try:
            while True:
                if is_asked and not select.select([mine], [], [], RETRY_SECONDS)[0]:
                    # The signal came before the program began to read.
                    asking.send_signal(signal.SIGINT)
                    continue
                piece = os.read(mine, 65_536)
                if not piece:
                    break
                shown += piece
                if not is_asked and shown.rstrip().endswith(b"[y/N]:"):
                    is_asked = True
                    if answer:
                        os.write(mine, answer)
                    else:
                        asking.send_signal(signal.SIGINT)
        except OSError:
            pass  # The other side of a terminal is gone.
        finally:
            os.close(mine)
    return asking.returncode, shown.decode()


def held_job(server: ConveyorServer, *urls: str, cap: int) -> str:
    """Submit tasks, and wait until as many calls as the cap allows are held in flight."""
    flags = ("--max-inflight", str(cap), "--max-attempts", "1")
    job_id = submitted(server, *urls, *flags)
    wait_for_calls(server, urls, cap)
    return job_id


def wait_for_calls(server: ConveyorServer, urls: Sequence[str], number: int) -> None:
    """Wait until so many calls are held in flight."""
    deadline = time.monotonic() + SECONDS
    while sum(server.hits.counts.get(url, 0) for url in urls if "delay" in url) < number:
        assert time.monotonic() < deadline, server.hits.counts
        time.sleep(0.01)


def held_urls(server: ConveyorServer, number: int) -> list[str]:
    return [server.url(f"held{index}", delay=1) for index in range(number)]


@pytest.mark.parametrize("takes_along", [False, True])
def test_a_rerun_after_a_stop_tells_what_it_leaves_out_or_takes_it_along(
    tmp_path: Path, takes_along: bool
) -> None:
    with held_server(tmp_path) as (server, calls):
        bad = server.url("bad", status=404)
        job_id = held_job(server, bad, *held_urls(server, 2), cap=1)
        conveyor(server, "stop", job_id)
        calls.release()
        ended = objects(conveyor(server, "watch", job_id, "--json"))[0]
        assert (ended["stats"]["completed"], ended["stats"]["total"]) == (2, 3)

        flags = ["--failed", *(["--unfinished"] if takes_along else [])]
        ran = conveyor(server, "rerun", job_id, *flags)
        assert ran.code == 0
        if takes_along:
            assert ran.out == [f"job {job_id}: 2 tasks to run again, 1 kept"]
            assert ran.err == []
        else:
            assert ran.out == [f"job {job_id}: 1 task to run again, 1 kept"]
            assert ran.err == [
                "1 task without a result left out (--unfinished takes them along); the run before"
                f" still lists them: conveyor export {job_id} --run {ended['run_id']} -o tasks.csv"
            ]


def test_a_rerun_that_finds_no_failure_names_the_option_for_the_rest(tmp_path: Path) -> None:
    with held_server(tmp_path) as (server, calls):
        job_id = held_job(server, *held_urls(server, 3), cap=1)
        conveyor(server, "stop", job_id)
        calls.release()
        conveyor(server, "watch", job_id)
        ran = conveyor(server, "rerun", job_id, "--failed")
        assert (ran.code, ran.out, len(ran.err)) == (1, [], 1)
        assert ran.err[0].endswith("; 2 tasks without a result: --unfinished runs them")
        assert conveyor(server, "rerun", job_id, "--unfinished", "--watch").code == 0


def test_the_last_line_of_a_watch_tells_what_jobs_tells(tmp_path: Path) -> None:
    with held_server(tmp_path) as (server, calls):
        job_id = held_job(server, *held_urls(server, 12), cap=4)
        with subprocess.Popen(
            [*CLIENT, "watch", job_id], env=environment(server), stdout=subprocess.PIPE, text=True
        ) as watching:
            assert watching.stdout is not None
            assert watching.stdout.readline().startswith("running: 0/12 done")
            assert conveyor(server, "stop", job_id).out == [f"job {job_id}: stopped, 0/12 done"]
            assert "0/12 done" in lines_until(watching.stdout, "stopped: ")[-1]
            calls.release()
            *_, last = watching.stdout.read().splitlines()
            assert watching.wait(SECONDS) == 3
        listed = objects(conveyor(server, "jobs", "--json"))[0]["latest_run"]["stats"]
    assert last.startswith("stopped: 12 tasks, 4 ok, 0 failed, 8 not done")
    assert (listed["completed"], listed["total"]) == (4, 12)


def test_explain_names_the_host_whose_limit_holds_a_job_back(tmp_path: Path) -> None:
    with held_server(tmp_path) as (server, calls):
        urls = held_urls(server, 5)
        job_id = submitted(server, "--per-host", "2", *urls)
        wait_for_calls(server, urls, 2)
        told = conveyor(server, "explain", job_id)
        host = f"{urlsplit(urls[0]).netloc}:80"
        assert told.out == [
            f"job {job_id}: 0 of 5 tasks done; its host holds it back:",
            f"  {host}: 3 tasks wait, 2 claimed; at most 2 calls at a time, set by the job "
            "(--per-host)",
            f"It goes on by itself. All its hosts: conveyor hosts {job_id}",
        ]
        [found] = objects(conveyor(server, "explain", job_id, "--json"))
        assert (found["waiting"], found["command"]) == (None, f"conveyor hosts {job_id}")
        assert [(one["host"], one["limit_set_by"]) for one in found["hosts"]] == [(host, "job")]
        [_, line] = conveyor(server, "hosts", job_id).out
        assert line.endswith(f"{host}, 2 at a time (job)")
        calls.release()
        conveyor(server, "watch", job_id)


SPOKEN: dict[str, list[str]] = {
    "submit": ["http://fake.test/json", "--watch"],
    "export": ["JOB", "-o", "OUT/pages.zip"],
    "watch": ["JOB"],
    "explain": ["JOB"],
    "results": ["JOB"],
    "jobs": [],
    "stop": ["JOB"],
    "pause": ["JOB"],
    "resume": ["JOB"],
    "failures": ["JOB"],
    "hosts": ["JOB"],
    "rerun": ["JOB"],
    "rm": ["JOB"],
    "run": ["http://fake.test/json", "-o", "OUT/pages", "--gateway", "fake"],
}
"""The commands that a user talks to a server with, each as a call that prints something."""
OTHERS = {
    "keys",
    "webhook",
    "listen",
    "open",
    "schedule",
    "simulate",
    "doctor",
    "api",
    "worker",
    "admin",
    "completion",
    "dev",
}
LIVE = {"stop", "pause", "resume"}


@pytest.mark.parametrize("name", SPOKEN)
def test_every_command_of_a_user_speaks_json(
    server: ConveyorServer, tmp_path: Path, name: str
) -> None:
    assert isinstance(program, click.Group)
    assert set(program.commands) == {*SPOKEN, *OTHERS}
    gone = {"status": 404} if name == "failures" else {}
    page = server.url(f"json/{name}", delay=600 if name in LIVE else 0, **gone)
    job_id = submitted(server, page, *(() if name in LIVE else ("--watch",)))
    if name == "resume":
        conveyor(server, "pause", job_id)
    words = [word.replace("JOB", job_id).replace("OUT", str(tmp_path)) for word in SPOKEN[name]]
    ran = conveyor(server, name, *words, "--json")
    assert ran.code == (3 if name == "failures" else 0), ran.err
    given = objects(ran)
    assert given
    for one in given:
        assert {"job_id", "task_id", "directory", "groups", "hosts"} & one.keys(), one
    if name in LIVE:
        conveyor(server, "rm", job_id)


def test_json_tells_where_files_are(server: ConveyorServer, tmp_path: Path) -> None:
    out = str(tmp_path / "pages")
    ran = conveyor(server, "submit", server.url("filed"), "--out", out, "--json")
    job, run, files = objects(ran)
    assert (job["accepted_tasks"], run["status"]) == (1, "completed")
    assert files == {"directory": out, "files": 1, "not_downloaded": [], "notes": []}
    checked = conveyor(server, "submit", server.url("filed"), "--check", "--json")
    assert objects(checked) == [{"checked_tasks": 1, "skipped_tasks": 0}]


def test_json_tells_why_tasks_failed_and_what_mends_it(server: ConveyorServer) -> None:
    url = server.url("json/gone", status=404)
    ran = conveyor(server, "submit", url, "--max-attempts", "1", "--watch", "--json")
    _job, run = objects(ran)
    [failure] = run["failures"]
    assert (ran.code, failure["tasks"], failure["first_url"]) == (3, 1, url)
    told = f"failed: {url}: {failure['reason']} ({failure['code']})"
    assert ran.err[-1] == (f"{told}; {failure['fix']}" if failure["fix"] else told)
    listed = conveyor(server, "results", run["job_id"], "--json")
    assert (objects(listed)[0]["url"], listed.err) == (url, ran.err[-1:])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_of_its_own(server: ConveyorServer, shell: str) -> None:
    ran = conveyor(server, "completion", shell)
    assert (ran.code, ran.err) == (0, [])
    assert f"_CONVEYOR_COMPLETE={shell}_complete" in "\n".join(ran.out)


def test_bash_completes_commands_and_jobs(server: ConveyorServer) -> None:
    job_id = submitted(server, server.url("completed"))
    assert completed(server, "conveyor wat") == ["watch"]
    assert completed(server, f"conveyor watch {job_id[:-2]}") == [job_id]
    assert completed(server, "conveyor rm la") == ["last"]
    assert completed(server, "conveyor rerun --unf") == ["--unfinished"]


def completed(server: ConveyorServer, line: str) -> list[str]:
    """Complete a command line in bash, as its Tab key does."""
    words = line.split(" ")
    bins = Path(CLIENT[0]).parent
    script = f"""
        eval "$(conveyor completion bash)"
        COMP_WORDS=({line}) COMP_CWORD={len(words) - 1}
        _conveyor_completion conveyor {words[-1]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment(server, PATH=f"{bins}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_no_server_means_no_job_ids_and_no_noise(server: ConveyorServer) -> None:
    done = subprocess.run(
        CLIENT,
        env=environment(
            server,
            CONVEYOR_URL="http://127.0.0.1:1/v1",
            _CONVEYOR_COMPLETE="bash_complete",
            COMP_WORDS="conveyor watch ",
            COMP_CWORD="2",
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,last\n", "")


def test_conveyor_dev_serves_like_the_program_of_that_name(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*CLIENT, "dev", "--gateway", "fake", "--port", "0", "--data-dir", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        api = json.loads(serving.stdout.readline())["api"]
        listed = subprocess.run(
            [*CLIENT, "jobs", "--server", api], capture_output=True, timeout=60, check=False
        )
        serving.send_signal(signal.SIGINT)
        assert serving.wait(SECONDS) == 0
    assert listed.returncode == 0
