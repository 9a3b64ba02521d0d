"""The flame graphs: CPU by thread, shared out by samples, summed by part, and drawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from bench.command import FLAMES, flame_parser
from bench.cpu_samples import LET_BE_SAMPLED, Frame, Sample
from bench.flame import (
    LOOP,
    PARTS,
    THREADS,
    Profile,
    Sampleable,
    Spent,
    picture,
    shared_out,
    table,
    words_of,
)
from bench.flame_graph import COLOURS, Box, Flame, shorten, svg
from bench.harness import ROOT
from bench.processes import counts_threads, thread_seconds

RUN = Frame("/py/lib/python3.11/asyncio/runners.py", "Runner.run")
HANDLE = Frame("/src/conveyor/handlers/task.py", "TaskHandler.handle")
FETCH = Frame("/src/conveyor/gateway/direct.py", "DirectGateway.fetch")
SEND = Frame("/src/conveyor/wire/client.py", "HttpClient.send")
ENTER = Frame("/src/conveyor/gateway/http_client.py", "HttpCall.__aenter__")
ENCODE = Frame("/py/lib/python3.11/json/encoder.py", "encode")
WORKER = Frame("/env/lib/python3.11/site-packages/aiosqlite/core.py", "_connection_worker_thread")
WRITE = Frame("/src/conveyor/dev/files.py", "write_file")


def test_each_thread_shares_out_its_own_cpu() -> None:
    samples = [
        Sample((RUN,), 1, 7),
        Sample((RUN, HANDLE), 3, 7),
        Sample((WORKER,), 50, 8),
        Sample((WRITE,), 2, 10),  # began and ended within the window
    ]
    spent = list(shared_out(samples, {7: 2.0, 8: 0.5, 9: 0.1}, loop=7))

    assert spent == [
        Spent((RUN,), 0.5, True),
        Spent((RUN, HANDLE), 1.5, True),
        Spent((WORKER,), 0.5, False),
        Spent((), 0.1, False),
    ]


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        ((RUN,), LOOP),
        ((RUN, HANDLE), "task handler"),
        ((RUN, HANDLE, ENCODE), "task handler"),
        ((RUN, HANDLE, FETCH), "gateway layer"),
        ((RUN, HANDLE, FETCH, ENTER), "gateway layer"),
        ((RUN, HANDLE, FETCH, SEND, ENCODE), "HTTP client"),
        ((RUN, HANDLE, FETCH, SEND, RUN), LOOP),
        ((), LOOP),
    ],
)
def test_a_stack_of_the_loop_counts_for_its_innermost_part(
    stack: tuple[Frame, ...], part: str
) -> None:
    assert Spent(stack, 1.0, in_loop=True).part == part


def test_other_threads_count_as_a_whole() -> None:
    assert Spent((WORKER, HANDLE), 1.0, in_loop=False).part == "store's threads"
    assert Spent((WRITE, ENCODE), 1.0, in_loop=False).part == "file writer's thread"
    assert Spent((ENCODE,), 1.0, in_loop=False).part == "other threads"


def test_parts_name_code_that_is_there() -> None:
    inside = [cost.inside.partition(" ")[0] for cost in (*PARTS, *THREADS)]
    own = [path for path in inside if path.startswith("/conveyor/")]

    assert [path for path in own if not (ROOT / path.strip("/")).exists()] == []


def profiled(*costs: tuple[tuple[Frame, ...], float]) -> Profile:
    return Profile(1_000, 1.0, [Spent(stack, seconds, True) for stack, seconds in costs])


def test_the_table_has_microseconds_a_task_by_part_the_greatest_first() -> None:
    this = [profiled(((RUN,), 0.01), ((RUN, HANDLE), 0.03)), profiled(((RUN, HANDLE), 0.04))]
    rows = table({"this": this})

    assert [(row.name, row.figures) for row in rows] == [
        ("all", {"this µs": 40.0}),
        ("task handler", {"this µs": 35.0}),
        (LOOP, {"this µs": 5.0}),
    ]


def test_the_table_shows_two_commits_and_parts_that_only_one_has() -> None:
    base = [profiled(((RUN, HANDLE), 0.08), ((RUN, FETCH), 0.02))]
    rows = table({"0123456": base, "this": [profiled(((RUN, HANDLE), 0.02), ((SEND,), 0.01))]})
    figures = {row.name: row.figures for row in rows}

    assert figures["all"] == {"0123456 µs": 100.0, "this µs": 30.0, "×": pytest.approx(0.3)}
    assert figures["task handler"]["×"] == pytest.approx(0.25)
    assert figures["HTTP client"] == {"0123456 µs": 0.0, "this µs": 10.0, "×": "–"}
    assert figures["gateway layer"]["this µs"] == 0


def test_a_picture_shows_costs_by_part_and_no_path_of_a_machine() -> None:
    spent = [
        Spent((RUN, HANDLE, FETCH), 0.03, True),
        Spent((RUN, HANDLE, SEND), 0.01, True),
        Spent((WORKER, WRITE), 0.02, False),
        Spent((), 0.001, False),
    ]
    drawn = picture("drain", [Profile(1_000, 1.0, spent)])
    titles = re.findall(r"<title>(.*?)</title>", drawn)

    ElementTree.fromstring(drawn)
    assert titles[0] == "drain: 61 µs of CPU a task"
    assert "the loop's thread: 40.0 µs a task" in titles
    assert "DirectGateway.fetch (conveyor/gateway/direct.py): 30.0 µs a task" in titles
    assert "HttpClient.send (conveyor/wire/client.py): 10.0 µs a task" in titles
    assert "write_file (conveyor/dev/files.py): 20.0 µs a task" in titles
    assert not re.search(r"/src/|/env/|/py/", drawn)
    assert drawn == picture("drain", [Profile(1_000, 1.0, spent)])


def boxes(words: str) -> tuple[Box, ...]:
    return tuple(Box(word, "a part") for word in words)


def test_frames_too_narrow_to_see_are_left_out_and_text_is_escaped() -> None:
    flames = [Flame(boxes("ab"), 999.5), Flame(boxes("ac"), 0.5), Flame((Box("<d>", "&"),), 50.0)]
    drawn = svg("a title", "below it", "µs", flames)
    shown = re.findall(r"<g><title>(.*?)</title>", drawn)

    ElementTree.fromstring(drawn)
    assert shown == ["&lt;d&gt;: 50.0 µs", "a: 1000.0 µs", "b: 999.5 µs"]
    widths = [
        float(width) for width in re.findall(r'<rect x="\S+" y="\d+" width="([\d.]+)"', drawn)
    ]
    assert widths[-3] / widths[-2] == pytest.approx(0.05, rel=0.02)


def test_an_empty_picture_is_one() -> None:
    ElementTree.fromstring(svg("a title", "below it", "µs", []))


def test_what_all_stacks_begin_with_is_cut_but_for_one_frame() -> None:
    assert shorten([boxes("abc"), boxes("abd")]) == 2
    assert shorten([boxes("abc"), boxes("ab")]) == 1
    assert shorten([boxes("abc")]) == 2
    assert shorten([boxes("a"), boxes("b")]) == 0
    assert shorten([]) == 0


def test_there_are_colours_for_all_parts() -> None:
    parts = {cost.name for cost in (*PARTS, *THREADS)} | {LOOP, "other threads"}

    assert len(set(COLOURS)) == len(COLOURS)
    assert len(parts) <= len(COLOURS)


def test_words_leave_out_where_things_are_installed() -> None:
    assert words_of(SEND) == "HttpClient.send (conveyor/wire/client.py)"
    assert words_of(WORKER) == "_connection_worker_thread (aiosqlite/core.py)"
    assert words_of(RUN) == "Runner.run (asyncio/runners.py)"
    assert words_of(Frame("<string>", "<module>")) == "<module> (<string>)"
    deep = Frame("/home/conveyor/.venv/lib/python3.13/site-packages/anyio/abc.py", "f")
    assert words_of(deep) == "f (anyio/abc.py)"


def test_the_command_names_its_jobs_and_a_sampled_server_lets_itself_be_sampled() -> None:
    assert flame_parser().parse_args(["drain"]).job in FLAMES
    with pytest.raises(SystemExit):
        flame_parser().parse_args(["boot"])
    command = Sampleable("this", ROOT).command
    assert command[:3] == [sys.executable, "-P", "-c"]
    assert command[3].startswith(f"{LET_BE_SAMPLED}; import sys, conveyor")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has prctl")
def test_the_words_that_let_a_process_be_sampled_are_python() -> None:
    subprocess.run([sys.executable, "-c", LET_BE_SAMPLED], check=True)


@pytest.mark.skipif(not counts_threads(), reason="this system does not count the CPU of threads")
def test_the_cpu_of_each_thread_is_read_in_nanoseconds() -> None:
    before = used = thread_seconds(os.getpid())[os.getpid()]
    # The system may count at its next tick alone.
    for _ in range(1_000):
        sum(range(300_000))
        used = thread_seconds(os.getpid())[os.getpid()] - before
        if used:
            break

    assert 0 < used < 100
