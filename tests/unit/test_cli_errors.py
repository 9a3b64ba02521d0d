"""Every error is one line on standard error and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor import cli
from conveyor.settings import Settings, client_environment


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVEYOR_URL", "http://127.0.0.1:1/v1")


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str, program: str = "main"
) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        getattr(cli, program)(list(arguments))
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nope"],
        ["nope"],
        ["submit"],
        ["submit", "http://a/", "--param", "novalue"],
        ["submit", "http://a/", "--priority", "high"],
        ["submit", "http://a/", "--per-host-rate", "nan"],
        ["submit", "http://a/", "--per-host-rate", "inf"],
        ["results", "J", "--status", "odd"],
        ["export", "J", "-o", "-", "--json"],
        ["jobs", "--limit", "0"],
        ["submit", "http://a/", "--out", ""],
        ["submit", "a.csv", "--field", "url"],
        ["submit", "a.csv", "--field", "name=1"],
        ["submit", "a.csv", "--delimiter", "ab"],
        ["submit", "a.csv", "--quote", ""],
        ["submit", "a.csv", "--type", "xml"],
        ["rerun", "J", "--group", "aaaaaaaaaaaa", "--unfinished"],
        ["results", "J", "--group", "aaaaaaaaaaaa", "--status", "all"],
        ["results", "J", "--group", "aaaaaaaaaaaa", "--out", "x"],
        ["export", "J"],
        ["export", "J", "-o", "x", "--format", "tar"],
        ["run", "http://a/"],
        ["run", "http://a/", "-o", ""],
        ["run", "http://a/", "-o", "out", "--workers", "0"],
        ["run", "http://a/", "-o", "out", "--gateway", "bogus"],
        ["stop"],
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("conveyor: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs"], "cannot reach http://127.0.0.1:1/v1: is conveyor-dev running?"),
        (["submit", "http://a/"], "cannot reach"),
        (["watch", "J"], "cannot reach"),
        (["failures", "J"], "cannot reach"),
        (["hosts", "J"], "cannot reach"),
        (["submit", "http://a/", "--check", "--per-host", "0"], "politeness.per_host: must be"),
        (["submit", "http://a/", "--check", "--per-host-rate", "0"], "politeness.per_host_rate: "),
        (["rm", "J", "K"], "cannot reach"),
        (["watch", ""], "no such job: ''"),
        (["rm", ".."], "no such job: .."),
        (["submit", "http://a/", "--out", "/dev/null/x"], "cannot write into /dev/null/x: "),
        (["watch", "J", "--out", "/dev/null/x"], "cannot write into /dev/null/x: "),
        (["rerun", "J", "--out", "/dev/null/x"], "cannot write into /dev/null/x: "),
        (["results", "J", "--out", "/dev/null/x"], "cannot write into /dev/null/x: "),
        (["jobs", "--server", "ftp://x"], "not a server address: ftp://x"),
        (["jobs", "--server", "http://127.0.0.1:99999/"], "not a server address: "),
        (["jobs", "--api-key", "schlüssel"], "the API key must be printable ASCII"),
        (["submit", "no-such-file"], "no such file: no-such-file"),
        (["submit", "."], "cannot read .: "),
        (["submit", "no-such.csv"], "no such file: no-such.csv"),
        (["submit", "a.csv", "http://a/"], "a.csv is sent as a file"),
        (["submit", "http://a/", "--header"], "--field, --header, --delimiter and --quote are for"),
        (["export", "J", "-o", "/dev/null/x"], "cannot write into /dev/null: "),
        (["export", "J", "-o", "/dev/null"], "/dev/null already exists (--force replaces it)"),
        (["export", "J", "-o", "."], ". is a directory"),
        (["run", "no-such-file", "-o", "/dev/null/x"], "no such file: no-such-file"),
        (["run", "http://a/", "-o", "/dev/null/x"], "cannot write into /dev/null/x: "),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"conveyor: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--port", "65536"], 2, ""),
        (["--workers", "0"], 2, ""),
        (["--log-format", "xml"], 2, ""),
        (["--data-dir", ""], 2, ""),
        (["--gateway", "bogus"], 2, "--gateway must be direct, fake, or "),
        (["--gateway", "bogus", "--demo"], 2, "--gateway must be direct, fake, or "),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data_dir = str(tmp_path_factory.mktemp("data"))
    got, out, err = run(capsys, "--data-dir", data_dir, *arguments, program="dev_main")
    assert (got, out) == (code, "")
    assert err.startswith(f"conveyor-dev: {message}")
    assert err.count("\n") == 1


def test_a_variable_that_does_not_fit_is_named_as_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_GATEWAY", "bogus")
    code, _out, err = run(capsys, program="dev_main")
    assert code == 1
    assert err.startswith("conveyor-dev: CONVEYOR_GATEWAY must be direct, fake, or ")


def test_a_file_of_hosts_that_cannot_be_used_keeps_a_server_from_starting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('"*.example" = { limt = 1 }')
    monkeypatch.setenv("CONVEYOR_HOSTS", str(hosts))
    arguments = ("--data-dir", str(tmp_path / "data"), "--port", "0")
    code, out, err = run(capsys, *arguments, program="dev_main")
    assert (code, out, err.count("\n")) == (1, "", 1)
    problem = "'*.example' has the unknown word 'limt'"
    assert err == f"conveyor-dev: CONVEYOR_HOSTS {hosts}: {problem}\n"
    assert not (tmp_path / "data").exists()


def test_help_tells_the_default_server_and_what_is_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _code, out, _err = run(capsys, "submit", "--help")
    shown = " ".join(out.split())
    assert f"http://{Settings().host}:{Settings().port}/v1" in shown
    assert "Blank lines and lines that start with # are skipped" in shown


def test_help_and_version_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["submit", "-h"], ["--version"]):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert out


def test_the_client_takes_its_server_and_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CONVEYOR_URL", "ZENROWS_BATCH_BASE_URL", "ZENROWS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    bare = client_environment()
    assert (bare.server, bare.api_key) == ("http://127.0.0.1:9000/v1", "local")
    monkeypatch.setenv("ZENROWS_BATCH_BASE_URL", "http://zenrows.test/v1")
    monkeypatch.setenv("ZENROWS_API_KEY", "k")
    assert client_environment().server == "http://zenrows.test/v1"
    assert client_environment().api_key == "k"
    monkeypatch.setenv("CONVEYOR_URL", "http://conveyor.test/v1")
    assert client_environment().server == "http://conveyor.test/v1"


def test_an_export_is_not_written_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, _out, err = run(capsys, "export", "J", "-o", "-")
    assert code == 2
    assert err == "conveyor: cannot write an export to a terminal: name a file, or redirect it\n"
