"""`conveyor simulate`: its output, its refusals, and its end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from conveyor import cli
from conveyor.cli.simulate import LEGEND, POLICIES, _show
from conveyor.simulation import simulate, view
from conveyor.simulation.planner import (
    PATIENCE,
    Question,
    real_seconds,
    refusal,
    remarks,
    scenarios,
)
from conveyor.simulation.view import FIGURES
from tests.unit.simulated_rows import FIELDS, row

SMALL = ("--tasks", "60", "--cap", "5", "--workers", "2", "--slots", "10", "--latency", "0.5")
AT_BEST = "6.1 s"
"""The time that the calls of SMALL take with seed 0, five at a time."""
QUESTION = Question(
    tasks=10_000,
    cap=100,
    workers=4,
    slots=50,
    latency=2.0,
    sigma=0.6,
    policies=("reserve", "local", "off"),
    seed=0,
)


@pytest.fixture(autouse=True)
def no_waiting_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the waiting line away, which appears after a second of real time, on a busy machine."""
    monkeypatch.setattr(view, "TICK", 3_600.0)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", *arguments])
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nan", "", "many", "1000001", "9" * 5_000])
@pytest.mark.parametrize("flag", ["--tasks", "--cap", "--workers", "--slots"])
def test_a_bad_number_is_one_line(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    code, out, err = run(capsys, flag, value)

    assert (code, out) == (2, "")
    assert err.startswith(f"conveyor: Invalid value for '{flag}': must be a whole number from 1 to")
    assert err.count("\n") == 1
    assert len(err) < 200


@pytest.mark.parametrize("value", ["0", "-2", "nan", "inf", "-inf", "1e400", "61", "2s", "\x1b[2J"])
def test_a_bad_latency_is_one_line(capsys: pytest.CaptureFixture[str], value: str) -> None:
    code, out, err = run(capsys, "--latency", value)

    assert (code, out) == (2, "")
    assert "'--latency': must be a number of seconds from 0.001 to 60, not" in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "arguments",
    [("--sigma", "nan"), ("--sigma", "-1"), ("--sigma", "3"), ("--seed", "-1"), ("--policy", "x")],
)
def test_other_bad_values_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (2, "")
    assert f"'{arguments[0]}'" in err
    assert err.count("\n") == 1


def test_the_table_the_bars_and_what_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL)
    lines = out.splitlines()

    assert (code, err) == (0, "")
    assert lines[0] == "60 tasks, at most 5 at a time; 2 workers of 10 slots."
    said = lines.index(f"At best the job takes {AT_BEST}.")
    assert [
        line.split()[0] for line in lines[:said] if line.startswith(("reserve ", "local ", "off "))
    ] == [
        *("reserve", "local", "off"),
        *("reserve", "local", "off"),
    ]
    assert "Messages received a task done, logarithmic:" in lines


def test_one_object_a_policy_with_the_fields_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _err = run(capsys, *SMALL, "--json", "--policy", "reserve", "--policy", "off")
    rows = [json.loads(line) for line in out.splitlines()]

    assert code == 0
    assert [made["policy"] for made in rows] == ["reserve", "off"]
    assert all(tuple(made) == FIELDS for made in rows)
    reserve = rows[0]
    assert reserve["completed"] == reserve["receives"] == 60
    assert (reserve["bounces"], reserve["seconds_over_cap"]) == (0, 0)
    assert reserve["peak_in_flight"] <= 5


@pytest.mark.parametrize(
    ("word", "policy"),
    [("gate on", "reserve"), ("gate-on", "reserve"), ("Gate Off", "off"), ("GATE-OFF", "off")],
)
def test_the_words_of_the_published_comparison_name_policies(
    capsys: pytest.CaptureFixture[str], word: str, policy: str
) -> None:
    code, out, _err = run(capsys, *SMALL, "--json", "--policy", word, "--policy", policy)

    assert code == 0
    assert [json.loads(line)["policy"] for line in out.splitlines()] == [policy]


@pytest.mark.parametrize("word", ["gate", "gateon", "on", "", "gate maybe", "x" * 5_000])
def test_other_words_are_refused_with_those_that_are_taken(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    code, out, err = run(capsys, *SMALL, "--policy", word)

    assert (code, out) == (2, "")
    assert "must be one of reserve, reserve-strict," in err
    assert "gate-on, gate-off; not" in err
    assert err.count("\n") == 1


def test_below_the_table_the_words_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _code, out, _err = run(capsys, *SMALL, "--policy", "gate-on")

    assert LEGEND in out.splitlines()


@pytest.mark.slow
def test_nothing_printed_is_wider_than_a_hundred_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    widest = Question(
        tasks=1_000_000,
        cap=100_000,
        workers=100,
        slots=1_000,
        latency=59.999,
        sigma=1.4999,
        policies=POLICIES,
        seed=2**32 - 1,
    )
    rows = [
        row(
            policy=policy,
            completed=999_999,
            tasks=1_000_000,
            window_s=359_999.0,
            elapsed_s=359_999.0,
            amplification=999_999.4,
            receive_calls_per_task=999_999.4,
            permit_calls_per_task=999_999.4,
            bounces=999_999_999,
            peak_in_flight=100_000,
            seconds_over_cap=359_999.0,
        )
        for policy in POLICIES
    ]
    _show(widest, rows)
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)
    assert sum(line.startswith("reserve-strict ") for line in lines) == 2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_output(capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, *SMALL, "--json", "--seed", "7")
    again = run(capsys, *SMALL, "--json", "--seed", "7")
    other = run(capsys, *SMALL, "--json", "--seed", "8")

    assert first == again
    assert first != other


def test_help_explains_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _err = run(capsys, "--help")
    shown = " ".join(out.split())

    assert code == 0
    for column in FIGURES:
        assert f"{' '.join(column.title.split())} {column.meaning}" in shown


def test_what_would_take_too_long_is_refused_with_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "--tasks", "1000000")
    advice = re.fullmatch(r"conveyor: simulating that takes about .+: try --tasks (\d+)\n", err)

    assert (code, out) == (2, "")
    assert advice is not None
    assert refusal(replace(QUESTION, tasks=int(advice[1]))) is None


@pytest.mark.parametrize("workers", [1, 4, 100])
@pytest.mark.parametrize("slots", [1, 50, 1_000])
@pytest.mark.parametrize("latency", [0.001, 2.0, 60.0])
@pytest.mark.parametrize("cap", [1, 100, 100_000])
@pytest.mark.parametrize("tasks", [1, 10_000, 1_000_000])
def test_advice_can_always_be_followed(
    tasks: int, cap: int, latency: float, slots: int, workers: int
) -> None:
    question = replace(
        QUESTION, tasks=tasks, cap=cap, latency=latency, slots=slots, workers=workers
    )
    problem = refusal(question)
    if problem is not None:
        advice = re.findall(r"--(\w+) (\d+)", problem.partition("try ")[2])
        assert advice
        question = replace(question, **{flag: int(number) for flag, number in advice})  # type: ignore[arg-type]

    assert real_seconds(question) <= PATIENCE


def test_policies_are_compared_on_the_same_work() -> None:
    made = scenarios(QUESTION)

    assert len({(scenario.world, scenario.jobs, scenario.seed) for scenario in made}) == 1
    assert [scenario.window is None for scenario in made] == [True, False, False]
    assert {scenario.permit_store for scenario in made[1:]} == {"atomic-rows"}


def test_what_was_cut_off_and_what_did_nothing_is_said() -> None:
    cut = {"completed": 5, "window_s": 90.0}
    said = " ".join(
        remarks(QUESTION, [row(), row(policy="local", **cut), row(policy="off", **cut)])
    )

    assert "Cut off after 1 min 30 s: local, off." in said
    assert "local did exactly what off did: it held no worker back." in said


def test_nothing_is_said_of_a_gate_that_did_something() -> None:
    said = " ".join(remarks(QUESTION, [row(policy="local"), row(policy="off", trace_hash="b")]))

    assert "local did exactly" not in said
    assert "Cut off" not in said


def test_a_cap_that_the_slots_never_reach_is_told() -> None:
    assert "The cap is never reached: there are 200 slots in all." in " ".join(
        remarks(replace(QUESTION, cap=201), [row()])
    )
    assert "never reached" not in " ".join(remarks(replace(QUESTION, cap=200), [row()]))


def test_one_slot_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--tasks", "1", "--workers", "1", "--slots", "1")
    _, out, _ = run(capsys, *one, "--cap", "1")
    assert out.startswith("1 task, at most 1 at a time; 1 worker of 1 slot.\nCalls take a median")
    assert "never reached" not in out
    assert "no worker reached" not in out
    _, out, _ = run(capsys, *one, "--cap", "2", "--sigma", "0")
    assert "\nEvery call takes 2 s. Seed 0.\n" in out
    assert "The cap is never reached: there is 1 slot in all." in out


def test_short_times_are_told_in_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--tasks", "1", "--latency", "0.001", "--sigma", "0", "--slots", "1")
    assert "At best the job takes 1 ms." in out
    assert "0.0 s" not in out
    nothing_done = row(policy="off", completed=0, window_s=0.005)
    assert "Cut off after 5 ms: off." in remarks(QUESTION, [nothing_done])


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2, 7, pytest.param(60, marks=pytest.mark.extended)])
@pytest.mark.parametrize("seed", range(4))
def test_no_job_is_done_sooner_than_at_best(tasks: int, seed: int) -> None:
    for cap, sigma in ((1, 0.6), (5, 1.5), (5, 0.0), (100, 0.6)):
        question = replace(QUESTION, tasks=tasks, cap=cap, sigma=sigma, slots=5, seed=seed)
        at_best = question.least_seconds()
        for made in scenarios(question):
            report = simulate(made)
            if report.completed == tasks:
                assert at_best <= report.elapsed_s
                # The others hide messages again and again, and may end by chance alone.
                is_bounded = report.policy == "reserve" and tasks >= 60 and cap >= 5
                assert not is_bounded or report.elapsed_s < 2 * at_best + 10.0


def test_calls_that_time_out_are_told() -> None:
    slow = replace(QUESTION, latency=60.0, sigma=1.0)

    said = "Calls time out after 180 s and are repeated; 13.6% are expected to."
    assert said in remarks(slow, [row()])
    assert not [line for line in remarks(QUESTION, [row()]) if "time out" in line]
    assert not [line for line in remarks(replace(slow, sigma=0), [row()]) if "time out" in line]


@pytest.mark.slow
def test_an_interrupt_is_one_line_and_its_exit_code() -> None:
    command = [sys.executable, "-m", "conveyor", "simulate", "--tasks", "200000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        assert child.stdout is not None
        try:
            assert child.stderr.readline().startswith("simulating reserve, 1 of 3")
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()

    assert (child.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("simulating")] == [
        "conveyor: interrupted"
    ]
