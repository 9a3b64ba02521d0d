"""Looking at a directory from which others remove."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.disk import files_below

TESTS = Path(__file__).resolve().parents[1]


def test_every_file_is_found_however_deep(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d/e"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    found = {str(path.relative_to(tmp_path)) for path in files_below(tmp_path)}

    assert found == {"a", "b/c", "b/d/e"}
    assert list(files_below(tmp_path, "/c")) == []
    assert list(files_below(tmp_path, "e")) == [tmp_path / "b/d/e"]


def test_a_directory_that_goes_while_others_are_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x")
    (tmp_path / "removed" / "below").mkdir(parents=True)
    (tmp_path / "removed" / "below" / "file").write_bytes(b"x")
    walk = files_below(tmp_path)

    assert next(walk) == tmp_path / "kept"
    shutil.rmtree(tmp_path / "removed")

    assert list(walk) == []


def test_no_test_walks_a_directory_of_a_server_in_another_way() -> None:
    walks = re.compile(r"\.rglob\(")
    others = [
        str(path.relative_to(TESTS))
        for path in files_below(TESTS, ".py")
        if walks.search(path.read_text())
    ]
    assert others == []
