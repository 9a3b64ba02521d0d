"""The banner of a server that is ready."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import msgspec
import pytest

from conveyor.roles.banner import BannerPrinter, banner, json_line, lines_to_try, path_line
from conveyor.roles.dev import ServerInfo
from conveyor.settings import Settings

API = "http://127.0.0.1:9000/v1"
INBOX = "http://127.0.0.1:9000/_dev/inbox"
PAGES = "http://127.0.0.1:9000/dashboard"
INFO = ServerInfo(api=API, pid=7, data_dir="/data", gateway="direct", inbox=INBOX, pages=PAGES)


def test_the_banner_is_at_most_ten_labelled_lines_with_one_to_paste() -> None:
    lines = banner(msgspec.structs.replace(INFO, slots="fewer"), Settings(allow_private=True))
    assert len(lines) <= 10
    assert lines[1].split() == ["pages", PAGES]
    assert all(line[:9].strip() and line[9] != " " for line in lines)
    assert f"export ZENROWS_BATCH_BASE_URL={API}" in "\n".join(lines)
    assert lines[0].split() == ["API", API]


def test_the_address_of_a_scraping_api_is_shown_without_its_secrets() -> None:
    info = ServerInfo(
        api=API, pid=7, data_dir="/data", gateway="https://user:pass@api.test/v1/?apikey=SECRET"
    )
    shown = "\n".join([*banner(info, Settings()), json_line(info)])
    assert "api.test" in shown
    assert "SECRET" not in shown
    assert "user:pass" not in shown


def test_pages_that_others_reach_are_said_to_ask_for_a_key() -> None:
    line = banner(INFO, Settings(host="0.0.0.0"))[1]
    assert line.split()[:2] == ["pages", PAGES]
    assert line.endswith("(asks for a key: any; from elsewhere over https)")


def relaxed(settings: Settings) -> list[str]:
    return [line for line in banner(INFO, settings) if line.startswith("relaxed")]


def test_every_relaxed_rule_is_told() -> None:
    any_key, events = relaxed(Settings())
    assert "any API key" in any_key
    assert "local" in any_key
    assert "http" in events
    assert "private" in relaxed(Settings(allow_private=True))[1]
    assert "THE NETWORK" in relaxed(Settings(host="0.0.0.0"))[0]


def test_json_is_one_line_with_what_a_program_needs(capsys: pytest.CaptureFixture[str]) -> None:
    BannerPrinter(as_json=True).ready(INFO, Settings())
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    told = {"api": API, "pid": 7, "data_dir": "/data", "gateway": "direct"}
    told |= {"pages": PAGES, "inbox": INBOX}
    assert json.loads(shown) == told


def test_the_banner_names_the_inbox_if_there_is_one() -> None:
    (line,) = [line for line in banner(INFO, Settings()) if line.startswith("inbox")]
    assert f"{INBOX}/HOST" in line
    assert "example.com" in line
    assert len(line) <= 80
    without = msgspec.structs.replace(INFO, inbox="")
    assert "inbox" not in "\n".join([*banner(without, Settings()), json_line(without)])


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = BannerPrinter(quiet=True)
    announcer.ready(INFO, Settings())
    announcer.stopping()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "gateway",
    [
        "https://user:secret@api.test/v1",
        "https://api.test/v1?apikey=secret",
        "https://api.test/?odd=secret&x=1#secret",
        "http://u:secret@h/#secret",
    ],
)
def test_what_may_be_a_key_in_the_gateway_is_not_shown(gateway: str) -> None:
    info = ServerInfo(api=API, pid=7, data_dir="/data", gateway=gateway)
    assert "secret" not in json_line(info) + "\n".join(banner(info, Settings(gateway=gateway)))


def test_a_note_comes_before_the_banner_and_not_among_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    BannerPrinter().ready(INFO, Settings(allow_private=True), note="another port")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "another port"
    assert len(lines) <= 10
    assert lines[2].split() == ["pages", PAGES]
    BannerPrinter(as_json=True).ready(INFO, Settings(), note="another port")
    shown = capsys.readouterr()
    assert json.loads(shown.out)["api"] == API
    assert shown.err == "another port\n"


def test_a_server_told_to_end_while_it_starts_does_not_call_itself_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announcer = BannerPrinter()
    announcer.stopping()
    announcer.ready(INFO, Settings())
    assert capsys.readouterr().out == "stopping\n"


def test_a_reader_that_left_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        BannerPrinter().ready(INFO, Settings())
        with pytest.raises(BrokenPipeError):
            stream.flush()
        monkeypatch.setattr("sys.stdout", None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_the_banner_says_how_a_shell_finds_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "a b"
    scripts.mkdir()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert path_line(str(scripts)) is None

    program = scripts / "conveyor"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    line = path_line(str(scripts))
    assert line is not None
    told = subprocess.run(
        ["sh", "-c", f"{line}\nconveyor"], capture_output=True, text=True, check=True
    )
    assert told.stdout == "found\n"

    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin")
    assert path_line(str(scripts)) is None


def test_the_export_line_stands_in_the_banner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (line,) = [line for line in banner(INFO, Settings()) if line.startswith("command")]
    assert line.split()[1:3] == ["export", f'PATH={sysconfig.get_path("scripts")}:"$PATH"']


def test_a_replay_offers_pages_that_are_recorded_to_try_and_none_without() -> None:
    replay = msgspec.structs.replace(INFO, gateway="replay")
    assert lines_to_try(replay) == []
    samples = ("http://shop.test/a?b='c'", "http://shop.test/d")
    submit, follow = lines_to_try(msgspec.structs.replace(replay, samples=samples))
    (body,) = (one for one in shlex.split(submit) if one.startswith("{"))
    assert [task["url"] for task in json.loads(body)["tasks"]] == list(samples)
    assert follow.startswith("then ")
    assert "https://example.com/" in lines_to_try(INFO)[0]
