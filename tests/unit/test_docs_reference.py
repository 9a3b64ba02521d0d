"""docs/reference against the code that it is made from, and the markers against the guarantees."""

from __future__ import annotations

import pytest
from reference import pages
from reference.project import promises
from reference.source import marked_tests


@pytest.mark.parametrize("name", pages.names())
def test_the_reference_is_what_the_code_says(name: str) -> None:
    difference = pages.difference_of(name)

    assert not difference, f"docs/reference/{name} is stale: {difference}\nrun: scripts/docs"


def test_the_reference_has_no_file_that_nothing_makes() -> None:
    assert sorted(path.name for path in pages.DIRECTORY.iterdir()) == sorted(pages.names())


def test_every_guarantee_has_a_test() -> None:
    tests = marked_tests()

    assert promises()
    assert not [guarantee for guarantee in promises() if not tests.get(guarantee)]


def test_every_marker_names_a_guarantee() -> None:
    unknown = {name: tests for name, tests in marked_tests().items() if name not in promises()}

    assert not unknown
