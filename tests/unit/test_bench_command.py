"""The command line of scripts/bench: help without an installation, and the options of each."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from bench import command, dispatch, idle, soak, wire
from bench.accounting import KINDS as ACCOUNTING
from bench.boot import ROWS as BOOT
from bench.drain import CONTENDERS as DRAIN
from bench.gateway_engine import SHARES as CLIENTS
from bench.harness import ROOT, Figure, Options, Ratio, Row, Scenario, table_lines
from bench.intake import KINDS as INTAKE
from bench.plugin import ROWS as PLUGIN
from bench.processes import used_between
from bench.results_page import WALKS
from bench.submit import KINDS as SUBMIT

COMPARABLE = {"drain", "submit", "accounting", "results_page", "boot"}


def isolated(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line without any installed package, as in a bare clone."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "bench" / "command.py"), *arguments],
        env={},
        capture_output=True,
        text=True,
    )


def test_help_names_the_question_of_each_benchmark_without_an_installation() -> None:
    result = isolated("--help")

    assert (result.returncode, result.stderr) == (0, "")
    for name, entry in command.SCENARIOS.items():
        assert f"  {name:<14}  {entry.question}\n" in result.stdout
    for name, question in command.OTHERS.items():
        assert f"  {name:<14}  {question}\n" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= command.WIDTH


@pytest.mark.parametrize("name", [*command.SCENARIOS, *command.OTHERS])
def test_help_of_each_benchmark_needs_no_installation(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse([name, "--help"])
    shown = capsys.readouterr().out

    assert ended.value.code == 0
    assert shown.startswith(f"usage: scripts/bench {name} ")
    assert max(map(len, shown.splitlines())) <= command.WIDTH
    options = {
        "--against": COMPARABLE | {"flame"},
        "--worked": {"aws_calls"},
        "--speed": {"fairness"},
        "--on": {"drain"},
        "--minutes": {"soak"},
    }
    for option, names in options.items():
        assert (f"{option} " in shown) == (name in names), option


def test_one_help_runs_isolated() -> None:
    result = isolated("accounting", "--help")

    assert result.returncode == 0
    assert "--against REV" in result.stdout


@pytest.mark.slow
def test_the_script_prints_help_from_a_bare_clone(tmp_path: Path) -> None:
    for name in ("bench", "install"):
        script = tmp_path / "scripts" / name
        script.parent.mkdir(exist_ok=True)
        script.write_bytes((ROOT / "scripts" / name).read_bytes())
        script.chmod(0o755)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "command.py").write_bytes((ROOT / "bench" / "command.py").read_bytes())
    before = sorted(tmp_path.glob("**/*"))
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "scripts" / "bench", *arguments],
            env={"PATH": path},
            capture_output=True,
            text=True,
        )

    result, one, wrong = run("--help"), run("boot", "--help"), run("boot", "--task", "3")

    assert (result.returncode, one.returncode, wrong.returncode) == (0, 0, 2)
    assert "How long until the server is ready?" in result.stdout
    assert "--tasks N" in one.stdout
    assert "unrecognized arguments: --task 3" in wrong.stderr
    assert run("nothing").stderr.startswith(
        "scripts/bench: unknown benchmark nothing; choose from drain,"
    )
    assert sorted(tmp_path.glob("**/*")) == before


@pytest.mark.parametrize(
    "name", sorted(COMPARABLE | {"intake", "ingest", "idle", "plugin", "soak"})
)
def test_each_scenario_has_the_question_and_the_sizes_of_the_command_line(name: str) -> None:
    scenario = importlib.import_module(f"bench.{name}").SCENARIO

    assert isinstance(scenario, Scenario)
    assert scenario.name == name
    assert scenario.question == command.SCENARIOS[name].question
    assert (scenario.against is not None) == ("against" in command.SCENARIOS[name].extra)


def test_the_rows_that_help_names_are_those_that_there_are() -> None:
    rows = {name: command.SCENARIOS[name].rows for name in command.SCENARIOS}

    assert rows["accounting"] == tuple(ACCOUNTING)
    assert rows["boot"] == BOOT
    assert rows["drain"] == tuple(DRAIN)
    assert rows["gateway_engine"] == tuple(CLIENTS)
    assert rows["idle"] == tuple(idle.CALLS)
    assert rows["plugin"] == PLUGIN
    assert rows["soak"] == tuple(soak.ENVIRONMENTS)
    assert rows["intake"] == tuple(INTAKE)
    assert rows["results_page"] == tuple(f"limit {limit}" for limit in WALKS)
    assert rows["submit"] == tuple(SUBMIT)
    assert not any("," in row for names in rows.values() for row in names)


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "many", ""])
def test_a_bad_count_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse(["submit", "--tasks", count])

    assert ended.value.code == 2
    assert "--tasks: must be a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "policy"),
    [("gate on", "reserve"), ("Gate-On", "reserve"), ("gate-off", "off"), ("local", "local")],
)
def test_dispatch_takes_the_words_of_the_published_comparison(word: str, policy: str) -> None:
    assert dispatch.parse(["--policy", word]).policy == [policy]


@pytest.mark.parametrize(
    "arguments", [["--policy", "gate"], ["--policy", "off", "--fairness"], ["--polic", "off"]]
)
def test_dispatch_refuses_other_words(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        dispatch.parse(arguments)

    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_wide_table_goes_on_below_itself_with_the_names_repeated() -> None:
    figures: dict[str, Figure] = {f"a figure of number {number}": 9_999_999 for number in range(12)}
    lines = table_lines([Row("a row", figures), Row("x" * 200, {})])

    assert max(map(len, lines)) <= command.WIDTH
    assert sum(line.startswith("a row ") for line in lines) == lines.count("") + 1 == 6
    for title in figures:
        assert sum(title in line for line in lines) >= 1


def test_a_table_that_fits_is_one_and_ratios_have_three_decimals() -> None:
    lines = table_lines([Row("a", {"n": 12_345, "ratio": Ratio(0.98765)}), Row("bb", {"n": 1})])

    assert lines == ["         n  ratio", "a   12,345  0.988", "bb       1      –"]


def test_the_widest_line_of_the_decoders_fits() -> None:
    lines = [
        wire.line_of(name, {"plain": 99.9999, "full": 99.9999}, remark)
        for name, remark, _work in wire.CONTENDERS
    ]

    assert max(map(len, lines)) <= command.WIDTH


def test_what_waits_is_compared_with_the_server_that_has_nothing_in_the_same_window() -> None:
    windows = [
        {idle.NOTHING: idle.Idled(nothing, 0), "calls of 1 s": idle.Idled(waiting, 50)}
        for nothing, waiting in ((0.002, 0.004), (0.001, 0.004), (0.004, 0.004))
    ]

    figures = idle.figures("calls of 1 s", 10_000, windows)

    assert (figures["waiting"], figures["% of a core"], figures["tasks/s"]) == (10_000, 0.4, 5.0)
    assert [figures[name] for name in ("× nothing queued", "× least", "× most")] == [2.0, 1.0, 4.0]
    assert idle.figures(idle.NOTHING, 10_000, windows)["waiting"] == 0


def test_what_a_thread_used_before_it_ended_is_not_counted_against_the_others() -> None:
    assert used_between({1: 5.0, 2: 7.0}, {1: 5.5, 3: 0.25}) == 0.75


@pytest.mark.parametrize(("last", "verdict"), [(103, "settled"), (104, "grows")])
def test_memory_has_settled_where_the_last_quarter_is_like_the_one_before(
    last: int, verdict: str
) -> None:
    samples = [
        soak.Sample(resident=megabytes << 20, anonymous=megabytes << 19)
        for megabytes in [60, 80, 90, 90, 90, 101, 99, 100, 100, last - 1, last, last + 9]
    ]

    figures = soak.memory_figures(soak.Sample(50 << 20, 0), samples)

    parts = [figures[f"part {number}"] for number in (1, 2, 3, 4)]
    assert parts == [80, 90, 100, last]
    assert (figures["RSS MB at start"], figures["peak"]) == (50, last + 9)
    assert figures["verdict"] == verdict


def test_only_names_rows() -> None:
    options = Options(work=Path("."), repeats=1, tasks=1, only=("no body (404)",))

    assert options.wants("no body (404)")
    assert not options.wants("a body each")
