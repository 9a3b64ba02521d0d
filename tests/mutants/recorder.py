"""A plugin of pytest that writes down which test passes which lines of the package, and its time.

`python -m pytest -p tests.mutants.recorder --lines-passed FILE …` writes the lines to FILE, a data
file of coverage.py with one context a test, and the seconds of each test that passed to a JSON file
beside it.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--lines-passed", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    config.pluginmanager.register(_Recorder(config.getoption("--lines-passed")))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._coverage = Coverage(data_file=str(file), config_file=False, source=["conveyor"])
        # Other copies of the tree read the file.
        self._coverage.set_option("run:relative_files", True)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._coverage.start()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = spent + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {test: spent for test, spent in self._seconds.items() if test not in self._failed}
        self._file.with_suffix(".json").write_text(json.dumps(passed))
