"""Compares JSON decoders on a submit of 100,000 tasks, and the cost of checking the tasks.

`python -m bench.wire` prints a table and one JSON line. The garbage collector stays on, as it is in
the server.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
import pydantic

from conveyor.domain import strict_json, submission

TASKS = 100_000
ROUNDS = 3


class _Task(pydantic.BaseModel):
    url: pydantic.AnyUrl
    external_id: str | None = None
    metadata: dict[str, str] | None = None


class _Document(pydantic.BaseModel):
    tasks: list[_Task]


def plain_body(count: int) -> bytes:
    """Encode a submit of tasks that have only a URL."""
    return json.dumps({"tasks": [{"url": _url(index)} for index in range(count)]}).encode()


def full_body(count: int) -> bytes:
    """Encode a submit of tasks with an external id and one key of metadata."""
    tasks = [
        {"url": _url(index), "external_id": f"sku-{index}", "metadata": {"batch": "spring"}}
        for index in range(count)
    ]
    return json.dumps({"tasks": tasks}).encode()


def _url(index: int) -> str:
    return f"https://shop.example.com/products/{index}?ref=newsletter"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate key")
    return fields


def _submit(body: bytes) -> None:
    request = submission.parse_job(strict_json.decode(body), submission.Limits())
    if len(request.specs) != TASKS:
        raise AssertionError("a task was lost")


def _hooked(body: bytes) -> object:
    return json.loads(body, object_pairs_hook=_unique)


CONTENDERS: tuple[tuple[str, str, Callable[[bytes], object]], ...] = (
    ("msgspec", "silent on duplicate keys", msgspec.json.decode),
    ("json", "silent on duplicates, NaN, surrogates", json.loads),
    ("json, pairs hook", "silent on NaN, surrogates", _hooked),
    ("pydantic model", "silent on duplicates; checks URLs", _Document.model_validate_json),
    ("strict_json", "refuses all of these (chosen)", strict_json.decode),
    ("strict_json, parse_job", "and checks every task", _submit),
)


def _best(work: Callable[[bytes], object], body: bytes) -> float:
    times = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.perf_counter()
        work(body)
        times.append(time.perf_counter() - start)
    return min(times)


def line_of(name: str, seconds: Mapping[str, float], remark: str) -> str:
    """Format a line of the table."""
    columns = "  ".join(f"{value:6.3f} ({value / TASKS * 1e6:5.2f})" for value in seconds.values())
    return f"{name:23}{columns}  {remark}"


def main() -> None:
    """Measure every contender on both bodies."""
    bodies = {"plain": plain_body(TASKS), "full": full_body(TASKS)}
    kinds = " and of ".join(bodies)
    print(f"{TASKS:,} tasks, best of {ROUNDS}; seconds (µs a task) of {kinds} bodies")
    results: dict[str, dict[str, float]] = {}
    for name, remark, work in CONTENDERS:
        seconds = {kind: _best(work, body) for kind, body in bodies.items()}
        results[name] = {kind: round(value, 4) for kind, value in seconds.items()}
        print(line_of(name, seconds, remark))
    line = {
        "bench": "wire",
        "tasks": TASKS,
        "python": platform.python_version(),
        "machine": sys.platform + " " + platform.machine(),
        "seconds": results,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
