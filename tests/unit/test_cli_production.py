"""The commands of production: what they want to be told, in one line, before they do anything."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from conveyor import cli
from conveyor.domain.key_hashes import key_hash
from conveyor.settings import PREFIX

FLEET = {
    "CONVEYOR_ENVIRONMENT": "staging",
    "CONVEYOR_REGION": "eu-west-1",
    "CONVEYOR_BUCKET": "bodies",
    "CONVEYOR_LEDGER": "dynamodb",
    "CONVEYOR_SECRET": "0123456789abcdef" * 4,
    "CONVEYOR_API_KEYS": "any",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is set but what a test sets."""
    for name in [name for name in os.environ if name.startswith((PREFIX, "AWS_"))]:
        monkeypatch.delenv(name)
    # What a command does to the logs ends with its test, as the stream that they go to does.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers])
    return monkeypatch


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["api"],
        ["worker"],
        ["admin", "init"],
        ["admin", "check"],
        ["admin", "destroy", "--yes", "staging"],
        ["admin", "ledger", "redis"],
        ["admin", "rebind"],
        ["admin", "dlq", "list"],
        ["admin", "dlq", "redrive", "--all"],
        ["admin", "dlq", "drop", "abc"],
    ],
)
def test_without_a_fleet_nothing_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (1, "")
    assert err.startswith("conveyor: CONVEYOR_ENVIRONMENT must name the fleet")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["api", "--port", "x"],
        ["worker", "--workers", "0"],
        ["worker", "--port", "1"],
        ["admin", "destroy"],
        ["admin", "ledger", "paper"],
        ["admin", "dlq", "redrive"],
        ["admin", "dlq", "drop", "abc", "--all"],
        ["admin", "nope"],
    ],
)
def test_a_bad_flag_is_a_mistake_of_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize("role", ["api", "worker"])
def test_without_a_command_the_role_of_the_environment_starts(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, role: str
) -> None:
    for name, value in FLEET.items():
        environment.setenv(name, value)
    environment.setenv("CONVEYOR_ROLE", role)
    environment.setenv("CONVEYOR_SECRET", "short")
    code, _, err = run(capsys)

    assert code == 1
    assert err.startswith("conveyor: CONVEYOR_SECRET must have 32 characters")


def test_an_unknown_role_is_told(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("CONVEYOR_ROLE", "both")

    assert run(capsys) == (1, "", "conveyor: CONVEYOR_ROLE must be one of api, worker\n")


def test_without_a_role_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)

    assert (code, err) == (0, "")
    assert "Usage: conveyor" in out


def test_destroying_wants_the_name_once_more(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    for name, value in FLEET.items():
        environment.setenv(name, value)
    code, out, err = run(capsys, "admin", "destroy", "--yes", "production")

    assert (code, out) == (1, "")
    assert err == "conveyor: --yes names production, CONVEYOR_ENVIRONMENT staging\n"


@pytest.mark.slow
def test_a_file_of_keys_that_is_missing_stops_an_api(tmp_path: Path) -> None:
    changed = {"CONVEYOR_API_KEYS": str(tmp_path / "none"), "CONVEYOR_METRICS_HOST": "127.0.0.1"}
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "conveyor", "api"),
            *("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"),
        ],
        env={**os.environ, **FLEET, **changed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "conveyor: CONVEYOR_API_KEYS must be any, hashes of keys, or a file of them that can be"
        " read\n"
    )


def test_a_hash_is_made_of_a_key_that_is_read(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
) -> None:
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"key-of-alice\n")))

    assert run(capsys, "admin", "key-hash") == (0, f"{key_hash('key-of-alice')}\n", "")
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" one\r\n\ntwo \n")))
    lines = f"{key_hash('one')}\n{key_hash('two')}\n"
    assert run(capsys, "admin", "key-hash") == (0, lines, "")
    environment.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run(capsys, "admin", "key-hash")[0] == 2


@pytest.mark.parametrize("line", ["schlüssel", "two words", "k" * 513, "a\x07b"])
def test_no_hash_is_made_where_one_is_a_key_that_no_request_carries(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch, line: str
) -> None:
    given = io.BytesIO(f"key-of-alice\n{line}\n".encode())
    environment.setattr("sys.stdin", io.TextIOWrapper(given))
    code, out, err = run(capsys, "admin", "key-hash")

    assert (code, out) == (1, "")
    assert err.startswith("conveyor: line 2 is no API key")
    assert line not in err


@pytest.mark.parametrize("group", [[], ["admin"], ["admin", "dlq"]])
def test_a_group_without_a_command_shows_its_help_as_it_is(
    capsys: pytest.CaptureFixture[str], group: list[str]
) -> None:
    code, out, err = run(capsys, *group)

    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['conveyor', *group])} ")
    assert "\nCommands:\n" in out


def test_every_group_is_among_these() -> None:
    def groups(command: click.Command, name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(command, click.Group):
            yield name
            for part, inner in command.commands.items():
                yield from groups(inner, (*name, part))

    assert set(groups(cli.conveyor, ())) == {(), ("admin",), ("admin", "dlq")}
    assert not isinstance(cli.conveyor_dev, click.Group)
