"""`submit --check`: the verdict of a server without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor.cli import main

A, B = "http://a.test/1", "http://b.test/2"
NOTHING_LISTENS = ("--server", "http://127.0.0.1:1/v1")


def checked(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, list[str], list[str]]:
    """The exit code and the lines of `submit --check`."""
    with pytest.raises(SystemExit) as ended:
        main(["submit", "--check", *NOTHING_LISTENS, *arguments])
    shown = capsys.readouterr()
    return ended.value.code or 0, shown.out.splitlines(), shown.err.splitlines()


def test_good_tasks_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, table = tmp_path / "list.txt", tmp_path / "table.csv"
    listed.write_text(f"{A} # note\nb.test/2\n")
    table.write_text(f"sep=;\nid;url\n1;{A}\n2;{B}\n;\n3;{B}\n")

    scheme = checked(capsys, "--scheme", "https", str(listed))
    assert scheme == (0, ["2 tasks, none refused; nothing was submitted"], [])
    assert checked(capsys, A)[1] == ["1 task, none refused; nothing was submitted"]
    assert checked(capsys, str(table), "--field", "external_id=ID")[1] == [
        "3 tasks, none refused; nothing was submitted"
    ]


def test_bad_tasks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, table = tmp_path / "list.txt", tmp_path / "table.csv"
    listed.write_text(f'{A}\nftp://x/\n{{"url": "{B}", "method": "PUT"}}\n')
    table.write_text(f'{A},1\n"{A}, {B}",2\nx\n')

    assert checked(capsys, str(listed)) == (
        1,
        [],
        [
            f"conveyor: {listed}:2: ftp://x/: URL must start with http:// or https://",
            f"conveyor: {listed}:3: PUT: method must be GET or POST",
            "conveyor: 2 tasks refused, nothing submitted",
        ],
    )
    code, out, err = checked(capsys, str(table), "--field", "external_id=1")
    assert (code, out) == (1, [])
    assert err[0].startswith(f"conveyor: {table}: record 2 at line 2: {A}, {B}: more than one URL")
    assert err[1] == f"conveyor: {table}: record 3 at line 3: too few columns: 1 of 2"
    assert err[2].startswith("conveyor: 2 of 3 tasks in the file are invalid; nothing was created")


def test_a_short_list_of_json_is_read_as_strictly_as_a_long_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"url": "{A}", "url": "{B}"}}\n')

    for arguments in ((str(path),), (str(path), "--type", "jsonl")):
        code, out, err = checked(capsys, *arguments)
        assert (code, out) == (1, [])
        assert 'names the key "url" twice in one object' in err[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--param", "wait=never", A), "zenrows_params.wait: this value is not allowed"),
        (("--priority", "10", A), "priority: must be a whole number from 0 to 9"),
    ],
)
def test_what_is_wrong_with_the_job_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = checked(capsys, *arguments)

    assert (code, out) == (1, [])
    assert message in err[0]


def test_the_params_of_a_job_judge_the_tasks_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"url": "{A}"}}\n{{"url": "{B}", "method": "POST"}}\n')

    err = checked(capsys, str(path), "--type", "jsonl", "--param", "js_render=1")[2]

    assert "record 2 at line 2: js_render" in err[0]


def test_bad_tasks_are_left_out_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, table = tmp_path / "list.txt", tmp_path / "table.csv"
    listed.write_text(f'{A}, {B}\n{A}\n{{"url": "{B}", "method": "PUT", "nam": 1}}\n{{\n')
    table.write_text(f"{A}\n" + "x\n" * 30)

    code, out, err = checked(capsys, str(listed), "--skip-invalid")
    assert (code, out) == (0, ["1 task, 3 refused; nothing was submitted"])
    assert [line.split(": ")[0] for line in err[:3]] == [
        f"skipped {listed}:1",
        f"skipped {listed}:4",
        f"skipped {listed}:3",
    ]
    assert err[3:] == ['warning: "nam" is no field of a task and was ignored (at index 1)']
    code, out, err = checked(capsys, str(table), "--skip-invalid")
    assert (code, out) == (0, ["1 task, 30 refused; nothing was submitted"])
    assert len(err) == 21
    assert err[0].startswith(f"skipped {table}: record 2 at line 2: x: URL must start with")
    assert err[-1] == "skipped and 10 more"


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_a_list_without_one_good_task_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = tmp_path / f"list.{suffix}"
    path.write_text(f'"{A}, {B}"\n')

    code, out, err = checked(capsys, str(path), "--skip-invalid")

    assert (code, out) == (1, [])
    assert f"{A}, {B}" in err[0]
