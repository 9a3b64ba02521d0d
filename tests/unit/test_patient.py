"""No test gives up on a server under test because the machine is busy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk import files_below

TESTS = Path(__file__).resolve().parents[1]
ASKS = {"get", "put", "post", "delete", "request", "stream", "Client", "AsyncClient"}
SAYS = {"timeout", "transport"}
"""Either tells how long is waited: a transport within the process waits for as long as it takes."""


def hasty(source: str) -> Iterator[int]:
    """The lines on which httpx is asked for something and left to its own five seconds."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "httpx"
            and node.func.attr in ASKS
            and not SAYS & {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno


@pytest.mark.slow
def test_every_request_says_how_long_it_waits() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in files_below(TESTS, ".py")
        for line in hasty(path.read_text())
    ]
    assert found == []


def test_a_request_that_does_not_say_is_found() -> None:
    assert list(
        hasty("httpx.get(url)\nhttpx.Client(\n    timeout=1)\nhttpx.Client(verify=False)")
    ) == [
        1,
        4,
    ]
