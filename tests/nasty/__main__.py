"""Ask for every nasty answer with curl and aiohttp, and write docs/hostile-answers.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from tests.nasty.certificate import Certificate
from tests.nasty.corpus import ANSWERS
from tests.nasty.origin import NastyOrigin
from tests.nasty.peers import Aiohttp, Case, Curl, Exchange, verdict
from tests.nasty.table import DOCUMENT, document


def main() -> int:
    """Run the command; the exit code."""
    argparse.ArgumentParser(
        prog="python -m tests.nasty", description=__doc__, epilog="It has no other options."
    ).parse_args()
    if shutil.which("curl") is None:
        sys.stderr.write("python -m tests.nasty: install curl first\n")
        return 1
    with tempfile.TemporaryDirectory() as directory:
        verdicts = _ask_all(Path(directory))
    DOCUMENT.write_text(document(list(verdicts), verdicts), encoding="utf-8")
    return 0


def _ask_all(directory: Path) -> dict[str, dict[str, str]]:
    """Return the verdicts of each peer by the full name of the answer."""
    certificate = Certificate(directory)
    answers = list(ANSWERS.values())
    curl, library = Curl(directory, certificate.authority), Aiohttp(certificate.authority)
    with (
        NastyOrigin(answers) as plain,
        NastyOrigin(answers, context=certificate.server_context()) as tls,
    ):
        return {
            curl.version: _verdicts(curl.exchange, plain, tls),
            library.version: _verdicts(library.exchange, plain, tls),
        }


def _verdicts(
    exchange: Callable[[NastyOrigin, Case], Exchange], plain: NastyOrigin, tls: NastyOrigin
) -> dict[str, str]:
    plain.served.clear()
    tls.served.clear()
    numbers = _numbers
    given = {}
    for name, answer in ANSWERS.items():
        number = next(numbers)
        origin = tls if answer.is_tls else plain
        given[name] = verdict(answer, exchange(origin, Case(answer, number)))
    return given


_numbers = count(1, 2)


if __name__ == "__main__":
    sys.exit(main())
