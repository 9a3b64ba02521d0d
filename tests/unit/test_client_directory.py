"""Directories of results: kept up to date, never overwritten unasked, true after any end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conveyor.client.directory import Destination, ManifestRow, ResultDirectory
from conveyor.client.errors import ClientError

LISTS = ["index.html", "manifest.jsonl"]


def listed(directory: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (directory / "manifest.jsonl").read_text().splitlines()))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Taking:
    """Takes bodies into a directory as a download does."""

    def __init__(self, directory: ResultDirectory, job_id: str, run_id: str) -> None:
        self.directory = directory
        self._ids = {"job_id": job_id, "run_id": run_id}

    def row(self, task_id: str, **fields: Any) -> ManifestRow:
        return ManifestRow(
            **{"task_id": task_id, "url": "http://a/", "status": "successful"} | self._ids | fields
        )

    def body(self, task_id: str, content: bytes, external_id: str | None = None) -> None:
        claimed = self.directory.claim(external_id, task_id)
        with self.directory.body(claimed, ".html", task_id) as new:
            new.file.write(content)
        row = self.row(task_id, external_id=external_id, file=new.name, size=len(content))
        self.directory.add(row)


def take(
    path: Path,
    work: Callable[[Taking], None],
    *,
    job: str = "J",
    run: str = "R",
    force: bool = False,
) -> list[str]:
    """Do the work on a directory; return what it says of files that had to move."""
    with ResultDirectory(Destination(path, force), job) as directory:
        work(Taking(directory, job, run))
    return directory.moved


def two(taking: Taking) -> None:
    taking.body("1", b"one", "a")
    taking.body("2", b"two", "A")


def test_a_manifest_and_an_index_lie_beside_the_files(tmp_path: Path) -> None:
    def work(taking: Taking) -> None:
        taking.directory.add(taking.row("3", status="failed"))
        two(taking)

    assert take(tmp_path, work) == []
    assert names(tmp_path) == sorted(["a.html", "A-2.html", *LISTS])
    rows = listed(tmp_path)
    assert [(row["task_id"], row["status"], row.get("file")) for row in rows] == [
        ("1", "successful", "a.html"),
        ("2", "successful", "A-2.html"),
        ("3", "failed", None),
    ]
    page = (tmp_path / "index.html").read_text()
    assert '<a href="A-2.html">A</a>' in page
    assert "3 tasks, 2 files." in page


def test_the_lists_are_true_after_an_interruption(tmp_path: Path) -> None:
    def work(taking: Taking) -> None:
        taking.body("1", b"one")
        with taking.directory.body(taking.directory.claim(None, "2"), ".html", "2") as new:
            new.file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(tmp_path, work)
    assert names(tmp_path) == ["1.html", *LISTS]
    assert [row["file"] for row in listed(tmp_path)] == ["1.html"]


def test_the_manifest_names_each_file_before_the_command_ends(tmp_path: Path) -> None:
    def work(taking: Taking) -> None:
        two(taking)
        # As a kill would find it.
        assert [row["file"] for row in listed(tmp_path)] == ["a.html", "A-2.html"]

    take(tmp_path, work)


def test_a_killed_command_is_taken_up_without_doubles(tmp_path: Path) -> None:
    take(tmp_path, two)
    manifest = tmp_path / "manifest.jsonl"
    first, second = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(first + second[:20])
    (tmp_path / "index.html").unlink()
    (tmp_path / ".3.html.part").write_bytes(b"half")

    def work(taking: Taking) -> None:
        assert taking.directory.held("1", "R")
        assert not taking.directory.held("2", "R")
        taking.body("2", b"two", "A-2")
        taking.body("3", b"three")

    assert take(tmp_path, work) == []
    assert names(tmp_path) == sorted(["a.html", "A-2.html", "3.html", *LISTS])
    assert [row["file"] for row in listed(tmp_path)] == ["a.html", "A-2.html", "3.html"]


def test_a_file_of_another_origin_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"precious")
    assert take(tmp_path, two) == [
        "a.html was there before: this one is a-2.html",
    ]
    assert (tmp_path / "a.html").read_bytes() == b"precious"
    assert (tmp_path / "a-2.html").read_bytes() == b"one"
    assert len(names(tmp_path)) == 5
    assert take(tmp_path, two) == []
    assert len(names(tmp_path)) == 5


def test_another_job_is_refused_and_by_force_replaced(tmp_path: Path) -> None:
    take(tmp_path, two)
    for job_id in ("K", None):
        with pytest.raises(ClientError, match="holds the results of job J: .* --force"):
            Destination(tmp_path).prepare(job_id)
    with pytest.raises(ClientError, match="--force"):
        take(tmp_path, two, job="K")
    assert {row["job_id"] for row in listed(tmp_path)} == {"J"}

    take(tmp_path, lambda taking: taking.body("1", b"new", "A"), job="K", force=True)
    assert names(tmp_path) == ["A.html", *LISTS]
    assert (tmp_path / "A.html").read_bytes() == b"new"
    assert [row["job_id"] for row in listed(tmp_path)] == ["K"]


@pytest.mark.parametrize("content", ['{"task_id": "1"}\n', "x\n", '{"url": 1}\n'])
def test_a_manifest_of_another_program_is_refused(tmp_path: Path, content: str) -> None:
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(content)
    with pytest.raises(ClientError, match="is not a manifest of conveyor .--force replaces it"):
        take(tmp_path, two)
    assert manifest.read_text() == content
    take(tmp_path, two, force=True)
    assert len(listed(tmp_path)) == 2


def test_an_index_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("my site")
    with pytest.raises(ClientError, match=r"index\.html already exists .--force replaces it"):
        take(tmp_path, two)
    assert names(tmp_path) == ["index.html"]


def test_lists_that_are_links_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious\n")
    out = tmp_path / "out"
    out.mkdir()
    for name in LISTS:
        (out / name).symlink_to(outside)
    with pytest.raises(ClientError, match="--force"):
        take(out, two)
    take(out, two, force=True)
    assert outside.read_text() == "precious\n"
    assert not (out / "manifest.jsonl").is_symlink()


def test_a_manifest_leads_to_no_file_outside_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    row = {"task_id": "1", "url": "u", "status": "successful", "job_id": "X", "run_id": "R"}
    (out / "manifest.jsonl").write_text(json.dumps(row | {"file": "../outside"}) + "\n")
    take(out, two, force=True)
    assert outside.read_text() == "precious"


def test_a_later_run_replaces_files_in_place_and_keeps_the_rest(tmp_path: Path) -> None:
    take(tmp_path, two)

    def later(taking: Taking) -> None:
        assert not taking.directory.held("1", "R2")
        assert taking.directory.held("1", "R2", "R")
        taking.body("1", b"newer", "a")

    take(tmp_path, later, run="R2")
    assert names(tmp_path) == sorted(["a.html", "A-2.html", *LISTS])
    assert (tmp_path / "a.html").read_bytes() == b"newer"
    assert [(row["run_id"], row["file"]) for row in listed(tmp_path)] == [
        ("R2", "a.html"),
        ("R", "A-2.html"),
    ]


def test_a_file_that_was_changed_or_removed_is_not_held(tmp_path: Path) -> None:
    take(tmp_path, two)
    (tmp_path / "a.html").write_bytes(b"longer")
    (tmp_path / "A-2.html").unlink()

    def work(taking: Taking) -> None:
        assert not taking.directory.held("1", "R")
        assert not taking.directory.held("2", "R")

    take(tmp_path, work)


def test_pages_named_like_the_lists_get_another_name(tmp_path: Path) -> None:
    take(tmp_path, lambda taking: taking.body("1", b"root", "index"))
    assert (tmp_path / "index-2.html").read_bytes() == b"root"
    assert listed(tmp_path)[0]["file"] == "index-2.html"


def test_two_commands_do_not_write_into_one_directory_at_once(tmp_path: Path) -> None:
    with (
        ResultDirectory(Destination(tmp_path), "JOB"),
        pytest.raises(ClientError, match="another command is writing"),
        ResultDirectory(Destination(tmp_path, force=True), "JOB"),
    ):
        raise AssertionError("the second one went on")
    with ResultDirectory(Destination(tmp_path), "JOB"):
        pass
