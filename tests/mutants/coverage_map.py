"""Know which tests pass a line, and how long each takes.

Each test module is watched once, and again when it or the package has changed. What was seen is
kept in `.mutants`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from tests.architecture.source import ROOT
from tests.disk import files_below
from tests.mutants.changes import Mutant
from tests.mutants.trees import Tree

KEPT = ROOT / ".mutants"
OPTIONS = ("-k", "not trio and not production", "-m", "not full and not extended")
CHUNK = 12
"""Test modules that one process watches: each start of one costs seconds."""
_LONGEST = 1_500.0

OF_TEXTS = (
    "test_architecture",
    "test_bench",
    "test_deploy",
    "test_docs",
    "test_imports",
    "test_mutants",
)
"""Tests that compare texts, or are about other programs: they would catch a change for its letters.
The limits of SPEC.md are behaviour."""
OVER_EMULATORS = ("test_admin", "test_aws", "test_dynamo", "test_s3", "test_sqs", "test_emulators")
"""Tests of adapters that are not mutated."""
OF_THE_SIMULATION = "test_simulat"
"""Tests that take minutes under watch, because they run the loop thousands of times."""


def test_modules() -> list[str]:
    """Return the modules whose tests catch mutants."""
    found = []
    for room in ("unit", "conformance"):
        for path in sorted((ROOT / "tests" / room).glob("test_*.py")):
            of_texts = path.stem.startswith(OF_TEXTS) and path.stem != "test_docs_limits"
            if not of_texts and not path.stem.startswith((*OVER_EMULATORS, OF_THE_SIMULATION)):
                found.append(path.relative_to(ROOT).as_posix())
    return found


@dataclass(slots=True)
class CoverageMap:
    """The record of a run: the data file of each test module, and the seconds of each test."""

    files: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _data: dict[Path, CoverageData] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that pass the line, those of the modules first that pass most of its
        file, and the fastest first. A line that runs at import is every test's of its file.

        Behind them come those that pass any line of its coroutine: nothing that a coroutine does is
        seen once an exception, such as a cancellation, was thrown into it from outside.
        """
        touched: Counter[str] = Counter()
        exact: dict[str, set[str]] = {}
        near: dict[str, set[str]] = {}
        for module, by_line in self._passed(mutant.path):
            touched[module] = len(by_line)
            exact[module] = _passing(by_line, mutant.lines if mutant.in_function else None)
            if mutant.coroutine is not None:
                near[module] = _passing(by_line, mutant.coroutine) - exact[module]
        modules = sorted(touched, key=lambda module: (-touched[module], module))
        return [
            test
            for chosen in (exact, near)
            for module in modules
            for test in sorted(chosen.get(module, ()), key=self._speed)
            if test in self.seconds
        ]

    def _speed(self, test: str) -> tuple[float, str]:
        return round(self.seconds.get(test, 0.0), 2), test

    def _passed(self, path: str) -> Iterable[tuple[str, dict[int, list[str]]]]:
        """Return of each test module the lines of a file that its tests pass."""
        with self._lock:
            by_file: defaultdict[Path, list[str]] = defaultdict(list)
            for module, file in self.files.items():
                by_file[file].append(module)
            for file, modules in by_file.items():
                if file not in self._data:
                    self._data[file] = CoverageData(str(file))
                    self._data[file].read()
                contexts = self._data[file].contexts_by_lineno(path)
                for module in modules:
                    own = {
                        line: [test for test in tests if test.startswith(f"{module}::")]
                        for line, tests in contexts.items()
                    }
                    own = {line: tests for line, tests in own.items() if tests}
                    if own:
                        yield module, own


def _passing(by_line: dict[int, list[str]], lines: tuple[int, int] | None) -> set[str]:
    """Return the tests that pass one of the lines, or any line at all."""
    first, last = lines or (0, sys.maxsize)
    return {test for line, tests in by_line.items() if first <= line <= last for test in tests}


def watch(trees: list[Tree], say: Callable[[str], None]) -> CoverageMap:
    """Watch the test modules that have changed, in one process for each tree."""
    KEPT.mkdir(exist_ok=True)
    index_file = KEPT / "index.json"
    index: dict[str, list[str]] = json.loads(index_file.read_text()) if index_file.exists() else {}
    package = _digest(sorted(files_below(ROOT / "conveyor", ".py")))
    digests = {module: package + _digest([ROOT / module]) for module in test_modules()}
    stale = [
        module
        for module, digest in digests.items()
        if index.get(module, [""])[0] != digest or not (KEPT / index[module][1]).exists()
    ]
    size = max(1, min(CHUNK, len(stale) // len(trees)))
    chunks = [stale[at : at + size] for at in range(0, len(stale), size)]
    free = list(trees)
    lock = threading.Lock()

    def watch_chunk(chunk: list[str]) -> None:
        with lock:
            tree = free.pop()
        name = _name(chunk, digests)
        file = KEPT / name
        file.unlink(missing_ok=True)
        recorder = ("-p", "tests.mutants.recorder", "--lines-passed", str(file))
        code, output = tree.pytest([*recorder, *OPTIONS, *chunk], seconds=_LONGEST)
        with lock:
            free.append(tree)
            if not file.with_suffix(".json").exists():
                raise RuntimeError(f"tests could not be watched ({code}): {output[-2_000:]}")
            index.update({module: [digests[module], name] for module in chunk})
            index_file.write_text(json.dumps(index))
            say(f"watched {', '.join(Path(module).stem for module in chunk)}")

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(watch_chunk, chunks))
    seen = CoverageMap(files={module: KEPT / index[module][1] for module in digests})
    for file in set(seen.files.values()):
        seen.seconds.update(json.loads(file.with_suffix(".json").read_text()))
    return seen


def _name(chunk: list[str], digests: dict[str, str]) -> str:
    texts = "".join(digests[module] for module in chunk)
    return f"{hashlib.sha256(texts.encode()).hexdigest()[:16]}.coverage"


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
