"""Signals to processes that have ended: a test or a benchmark that sends one goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import Child
from tests.acceptance.support_commands import Fork


def test_a_process_that_ended_untold_may_be_killed() -> None:
    ended = _ended()
    ours, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_own:
        its_own.send(b"%d" % ended)
        fork = Fork(ours)
        fork.kill()
        fork.send_signal(signal.SIGTERM)
        assert fork.poll() is None
        its_own.send(b"3")
        assert fork.wait(1.0) == 3


def test_a_tree_of_which_a_process_ends_meanwhile_is_frozen_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _ended()
    child = Child([sys.executable, "-c", "import signal; signal.pause()"], log=tmp_path / "log")
    monkeypatch.setattr("bench.processes.tree", lambda root: [ended, root])
    try:
        child.freeze()
        assert _next_change(child.pid, os.WSTOPPED) == os.CLD_STOPPED
        child.thaw()
        assert _next_change(child.pid, os.WCONTINUED) == os.CLD_CONTINUED
    finally:
        child.stop()


def _ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _next_change(pid: int, kind: int) -> int:
    """Wait until a child is stopped or goes on; return which."""
    found = os.waitid(os.P_PID, pid, kind)
    assert found is not None
    return found.si_code
