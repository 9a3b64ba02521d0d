"""`conveyor-dev exec`: a command, its server, its exit code, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.acceptance.support_cli import SERVER
from tests.acceptance.support_wire import eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TELLING = """
from zenrows import ZenRowsBatchClient

client = ZenRowsBatchClient("a-key-of-this-test")
urls = ["http://shop.test/a", "http://shop.test/b?token=planted-one&body=planted-one"]
run = client.submit_regular(urls).run.wait(poll_interval=0.1)
print(run.stats.successful)
"""
RUN = """
import os, sys, urllib.request
assert os.environ["ZENROWS_API_KEY"] == "local"
assert os.environ["ZENROWS_BATCH_BASE_URL"] == os.environ["CONVEYOR_URL"]
request = urllib.request.Request(
    os.environ["CONVEYOR_DEV_URL"] + "/clock",
    headers={"Authorization": "Bearer " + os.environ["CONVEYOR_DEV_TOKEN"]},
)
assert urllib.request.urlopen(request, timeout=60).status == 200
print(os.environ["CONVEYOR_URL"])
sys.exit(int(sys.argv[1]))
"""
KILL = """
import os, pathlib, sys, time
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes().split(b"\\0")
    except OSError:
        continue  # it has ended
    if b"--data-dir" in words and any(word.startswith(sys.argv[1].encode()) for word in words):
        if int(path.parent.name) != os.getpid():
            os.kill(int(path.parent.name), 9)
time.sleep(600)
"""
WAIT = """
import pathlib, signal, sys, time
told, got = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
while len(got) < 2:
    told.write_text(str(len(got)))
    time.sleep(0.01)
sys.exit(130)
"""

COUNT = """
import pathlib, signal, sys, time
told, got = pathlib.Path(sys.argv[1]), []
def note(number, _):
    got.append(signal.Signals(number).name)
for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), note)
while "SIGUSR2" not in got:
    told.write_text(" ".join(["ready", *got]))
    time.sleep(0.01)
told.write_text(" ".join(["ready", *got]))
sys.exit(7)
"""
ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
STAY = """
import os, pathlib, sys, time
told = pathlib.Path(sys.argv[1])
told.with_suffix(".new").write_text(str(os.getpid()))
told.with_suffix(".new").rename(told)
time.sleep(600)
"""


def _command(*words: str, flags: Sequence[str] = ()) -> list[str]:
    return [*SERVER, "exec", "--gateway", "fake", *flags, "--", *words]


def _environment(directory: Path) -> dict[str, str]:
    """The environment of a command whose temporary files are its own."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("CONVEYOR_", "ZENROWS_"))}
    return {**kept, "TMPDIR": str(directory)}


def _run(
    directory: Path, *words: str, flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*words, flags=flags),
        env=_environment(directory),
        capture_output=True,
        text=True,
        timeout=300,
    )


def _left(directory: Path) -> list[str]:
    """The remains of servers: their directories, and processes that work there."""
    left = [path.name for path in directory.iterdir()]
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue  # no process, or it has ended
        if str(directory).encode() in words and int(process.name) != os.getpid():
            left.append(process.name)
    return left


@pytest.mark.parametrize(
    "code",
    [5, *(pytest.param(code, marks=pytest.mark.extended) for code in (0, 1, 130))],
)
def test_the_exit_code_is_the_commands_and_nothing_else_is_printed(
    tmp_path: Path, code: int
) -> None:
    ran = _run(tmp_path, sys.executable, "-c", RUN, str(code))
    assert (ran.returncode, ran.stderr) == (code, "")
    [line] = ran.stdout.splitlines()
    assert line.startswith("http://127.0.0.1:")
    assert _left(tmp_path) == []


def documented(heading: str) -> list[str]:
    """The examples below a heading of the document that the published client comes with."""
    document = distribution("zenrows").read_text("METADATA") or ""
    section = re.split(r"\n##+ ", document.partition(f" {heading}\n")[2])[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.extended
def test_the_examples_of_the_official_client_run_without_a_change(tmp_path: Path) -> None:
    [quickstart] = documented("Quickstart — Batch API (`ZenRowsBatchClient`)")
    downloads = documented("Download results")
    failing, idempotent = documented("Error handling")
    later = [
        *documented("Extract in a batch"),
        *documented("Upload URLs from a CSV"),
        *documented("Estimate cost before submitting"),
        *downloads,
        documented("Scheduled jobs & webhooks")[0],
        idempotent,
    ]
    assert (len(downloads), len(later)) == (5, 10)
    where = tmp_path / "application"
    where.mkdir()
    (where / "leads.csv").write_text("Lead Ref,Page URL\nr1,https://example.com/lead\n")
    (where / "quickstart.py").write_text(quickstart)
    # Names that the document leaves to its reader.
    own = "wanted = {'order-1'}\n\ndef process(body, kind):\n    print(kind)\n"
    (where / "later.py").write_text("\n".join([quickstart, own, *later, failing]))
    ran = [
        subprocess.run(
            _command(sys.executable, f"{name}.py"),
            cwd=where,
            env=_environment(tmp_path / "temporary"),
            capture_output=True,
            text=True,
            timeout=110,
        )
        for name in ("quickstart", "later")
    ]
    # The last example raises what it shows.
    assert [one.returncode for one in ran] == [0, 1], ran
    assert "2/2 succeeded\ndownloaded 2 results to ./out/\n" in ran[0].stdout
    assert "10 credits (2 tasks)" in ran[1].stdout
    assert "not_found" in ran[1].stderr
    made = {path.name for path in where.iterdir()}
    assert {"out", "results.zip"} <= made
    assert {path.stem for path in (where / "out").iterdir()} >= {"order-1", "order-2"}
    assert _left(tmp_path / "temporary") == []


def test_a_killed_command_and_those_that_cannot_run(tmp_path: Path) -> None:
    killed = _run(tmp_path, "sh", "-c", "kill -9 $$")
    assert (killed.returncode, killed.stdout, killed.stderr) == (137, "", "")
    missing = _run(tmp_path, "no-such-command")
    assert missing.returncode == 127
    assert missing.stderr == "conveyor-dev: exec: no-such-command: not found\n"
    (tmp_path / "plain").write_text("text")
    assert _run(tmp_path, str(tmp_path / "plain")).returncode == 126
    (tmp_path / "plain").unlink()
    none = subprocess.run(_command(), capture_output=True, text=True, timeout=60)
    assert none.returncode == 2
    assert _left(tmp_path) == []


@pytest.mark.extended
def test_a_server_that_fails_is_told_by_its_last_lines(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rules]]\nhots = 1")
    temporary = tmp_path / "temporary"
    ran = _run(temporary, "true", flags=["--rules", str(rules)])
    assert ran.returncode == 70
    assert "rules.toml, line 2: rules[0].hots" in ran.stderr
    dead = _run(temporary, sys.executable, "-c", KILL, str(temporary))
    assert dead.returncode == 70
    assert "the server was ended by signal 9" in dead.stderr
    assert _left(temporary) == []


def test_signals_go_to_the_command_first(tmp_path: Path) -> None:
    _interrupted(tmp_path)


@pytest.mark.parametrize("has_input", [True, False])
@pytest.mark.extended
def test_each_signal_reaches_a_command_on_a_terminal_once(tmp_path: Path, has_input: bool) -> None:
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    keys, terminal = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *_command(sys.executable, "-c", COUNT, str(told))],
        env=_environment(temporary),
        stdin=terminal if has_input else subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        heard = "ready"
        eventually(partial(_told, told, heard), heard, timeout=60)
        for key, number in (
            (b"\x03", signal.SIGINT),
            (b"", signal.SIGUSR1),
            (b"\x1c", signal.SIGQUIT),
            (b"", signal.SIGINT),
            (b"", signal.SIGHUP),
            (b"", signal.SIGQUIT),
            (b"", signal.SIGUSR2),
        ):
            if key:
                os.write(keys, key)
            else:
                child.send_signal(number)
            heard = f"{heard} {number.name}"
            eventually(partial(_told, told, heard), heard, timeout=60)
        assert child.wait(60) == 7
    finally:
        child.kill()
        child.wait()
        os.close(keys)
    assert _left(temporary) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a parent")
def test_no_server_outlives_a_killed_exec(tmp_path: Path) -> None:
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    child = subprocess.Popen(
        _command(sys.executable, "-c", STAY, str(told)), env=_environment(temporary)
    )
    try:
        eventually(lambda: told.exists() or None, "the command runs", timeout=60)
        assert any(name.isdecimal() for name in _left(temporary))
    finally:
        child.kill()
        child.wait()
    try:
        eventually(partial(_has_ended, temporary), "the server has ended", timeout=60)
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a parent")
@pytest.mark.extended
def test_the_next_exec_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    running = [
        subprocess.Popen(
            _command(sys.executable, "-c", STAY, f"{told}{number}"), env=_environment(temporary)
        )
        for number in range(2)
    ]
    others = [temporary / "conveyor-exec-plain", temporary / "others"]
    try:
        for number in range(2):
            runs = partial(_is_there, Path(f"{told}{number}"))
            eventually(runs, "a command runs", timeout=60)
        for other in others:
            other.mkdir()
        (others[0] / "kept").touch()
        (temporary / "conveyor-exec-link").symlink_to(others[1])
        assert len(_owned(temporary)) == 2
        running[0].kill()
        running[0].wait()
        eventually(partial(_has_one, temporary), "a directory is removed", timeout=60)
        assert running[1].poll() is None
        assert (others[0] / "kept").exists()
        assert others[1].exists()
    finally:
        for child in running:
            child.kill()
            child.wait()
        for number in range(2):
            os.kill(int(Path(f"{told}{number}").read_text()), signal.SIGKILL)


def _is_there(path: Path) -> bool | None:
    return path.exists() or None


def _owned(temporary: Path) -> list[Path]:
    return list(temporary.glob("conveyor-exec-*/owner"))


def _has_one(temporary: Path) -> bool | None:
    """Run another command; return True if one of the directories of others is left."""
    assert _run(temporary, "true").returncode == 0
    return True if len(_owned(temporary)) == 1 else None


@pytest.mark.extended
def test_answers_that_were_not_recorded_are_told_in_a_line(tmp_path: Path) -> None:
    kept, temporary = tmp_path / "recording", tmp_path / "temporary"
    ran = _run(temporary, sys.executable, "-c", TELLING, flags=["--record", str(kept)])
    assert (ran.returncode, ran.stdout) == (0, "2\n")
    assert ran.stderr == (
        "conveyor-dev: exec: not recorded: 1 answers that held a secret of their request, of "
        "shop.test\n"
    )
    again = _run(temporary, sys.executable, "-c", TELLING, flags=["--replay", str(kept)])
    assert (again.returncode, again.stdout, again.stderr) == (0, "1\n", "")
    assert _left(temporary) == []


def _has_ended(directory: Path) -> bool | None:
    return None if any(name.isdecimal() for name in _left(directory)) else True


@pytest.mark.extended
def test_many_at_once_have_their_own_codes_and_leave_nothing(tmp_path: Path) -> None:
    before = _status()

    def run(number: int) -> tuple[int, str]:
        ran = _run(tmp_path / str(number), sys.executable, "-c", RUN, str(number))
        return ran.returncode, ran.stdout

    with ThreadPoolExecutor(50) as pool:
        ran = list(pool.map(run, range(50)))
    assert [code for code, _ in ran] == list(range(50))
    assert len({url for _, url in ran}) == 50
    assert [_left(tmp_path / str(number)) for number in range(50)] == [[]] * 50
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda number: _interrupted(tmp_path / f"i{number}"), range(10)))
    assert _status() == before


def _interrupted(directory: Path) -> None:
    """Interrupt a command twice that ends after the second time."""
    told, temporary = directory / "told", directory / "temporary"
    child = subprocess.Popen(
        _command(sys.executable, "-c", WAIT, str(told)),
        env=_environment(temporary),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        for got in ("0", "1"):
            eventually(partial(_told, told, got), f"{got} signals", timeout=240)
            child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=240)
        assert (child.returncode, out, err) == (130, b"", b"")
    finally:
        child.kill()
        child.wait()
    assert _left(temporary) == []


def _told(path: Path, text: str) -> bool | None:
    """Return True if a file has this text, else None."""
    return True if path.exists() and path.read_text() == text else None


def _status() -> str:
    """The state of the checkout, if this is one."""
    if not (ROOT / ".git").exists():
        return ""
    shown = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return shown.stdout
