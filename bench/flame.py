"""Shows where the CPU of a task goes: a flame graph, and a table by part.

    scripts/bench flame drain|accounting [--against REV]

conveyor-dev works a job while py-spy samples the stacks of its threads. The kernel tells how much
CPU each thread used; the samples of a thread share that out among its stacks, so that system calls
count too. A frame's time belongs to the innermost caller that has a part of its own.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench import accounting
from bench.against import Code, NoSuchCommit, checkout
from bench.command import flame_parser
from bench.conveyor_server import ConveyorServer
from bench.cpu_samples import (
    LET_BE_SAMPLED,
    THREADS_RATE,
    Cost,
    Frame,
    Sample,
    cost_of,
    find_py_spy,
    read_samples,
    sampled,
)
from bench.drain import DIRECT, places
from bench.fake_targets import small
from bench.flame_graph import Box, Flame, shorten, svg
from bench.harness import (
    ROOT,
    Figure,
    Options,
    Ratio,
    Row,
    fresh_work,
    machine,
    print_json,
    print_table,
    print_wrapped,
)
from bench.processes import counts_threads, thread_seconds
from bench.rounds import QUIET, Rounds, take_rounds
from bench.servers import MissingProgram, find_nginx, nginx

WARM_UP = 500
_INSTALLED = re.compile(r".*(/site-packages/|/lib/python[0-9.]+/|/(?=conveyor/))")
LOOP = "event loop: uvloop, asyncio"
CLIENT = "HTTP client"
PARTS = (
    Cost("/conveyor/wire/", CLIENT),
    Cost("/conveyor/gateway/http_client.py HttpCall", "gateway layer"),
    Cost("/conveyor/gateway/http_client.py", CLIENT),
    Cost("/conveyor/gateway/aiohttp_client.py", CLIENT),
    Cost("/site-packages/aiohttp/", CLIENT),
    Cost("/site-packages/yarl/", CLIENT),
    Cost("/site-packages/multidict/", CLIENT),
    Cost("/site-packages/aiohappyeyeballs/", CLIENT),
    Cost("/conveyor/gateway/", "gateway layer"),
    Cost("/conveyor/handlers/", "task handler"),
    Cost("/conveyor/engine/", "dispatcher"),
    Cost("/conveyor/dev/sqlite/", "store, loop side"),
    Cost("/site-packages/aiosqlite/", "store, loop side"),
    Cost("/conveyor/dev/files.py", "files, loop side"),
    Cost("/conveyor/dev/", "queues and permits"),
    Cost("/conveyor/http/", "API (the benchmark's polls)"),
    Cost("/conveyor/service/", "API (the benchmark's polls)"),
    Cost("/site-packages/starlette/", "API (the benchmark's polls)"),
    Cost("/site-packages/uvicorn/", "API (the benchmark's polls)"),
    Cost("/conveyor/aio/", "anyio"),
    Cost("/site-packages/anyio/", "anyio"),
    Cost("/asyncio/", LOOP),
    Cost("/conveyor/", "the rest of Conveyor"),
)
"""The parts of the loop's thread."""
STORE, FILES, OTHERS = "store's threads", "file writer's thread", "other threads"
THREADS = (
    Cost("/conveyor/dev/sqlite/", STORE),
    Cost("/site-packages/aiosqlite/", STORE),
    Cost("/conveyor/dev/files.py", FILES),
)
"""The parts of all other threads, each as a whole."""


class Spent(NamedTuple):
    """CPU seconds of one stack, outermost first, of the loop's thread or another one."""

    stack: tuple[Frame, ...]
    seconds: float
    in_loop: bool

    @property
    def part(self) -> str:
        """Return the part of the table that it counts for."""
        if self.in_loop:
            return cost_of(self.stack, PARTS, other=LOOP)
        return cost_of(self.stack, THREADS, other=OTHERS)


@dataclass(frozen=True, slots=True)
class Profile:
    """One job worked: its tasks, seconds of wall, and the CPU of each stack."""

    tasks: int
    seconds: float
    spent: Sequence[Spent]


@dataclass(frozen=True, slots=True)
class Sampleable(Code):
    """A version of Conveyor whose process other processes of this user may sample."""

    @property
    def command(self) -> list[str]:
        """Return the command that starts its conveyor-dev."""
        *python, program = Code(self.label, self.root).command
        return [*python, f"{LET_BE_SAMPLED}; {program}"]


Job = tuple[Sequence[str], Callable[[int], str]]
"""Arguments of conveyor-dev, and the URL of a task by its number."""


def job_of(name: str, directory: Path, stack: ExitStack) -> Job:
    """Start what a scenario needs."""
    if name == "accounting":
        return accounting.ARGUMENTS, small
    site = stack.enter_context(nginx(directory / "nginx"))
    return DIRECT, lambda number: f"{site.url}/{number}"


def shared_out(
    samples: Sequence[Sample], seconds: Mapping[int, float], loop: int
) -> Iterator[Spent]:
    """Share out the CPU of each thread among its stacks. A thread that was never seen, since it
    used hardly any, has an empty stack."""
    seen: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        seen[sample.thread].append(sample)
    for thread, used in seconds.items():
        whole = sum(sample.times for sample in seen[thread])
        if not whole:
            yield Spent((), used, thread == loop)
        for sample in seen[thread]:
            yield Spent(sample.stack, used * sample.times / whole, thread == loop)


@contextmanager
def watched(pid: int, path: Path, found: dict[int, float]) -> Iterator[None]:
    """Sample a process, and put the CPU seconds of each of its threads into `found`."""
    with sampled(pid, path, threads=True):
        before = thread_seconds(pid)
        yield
        after = thread_seconds(pid)
    found.update({thread: used - before.get(thread, 0.0) for thread, used in after.items()})


def profile(name: str, code: Code, options: Options) -> Profile:
    """Work one job and sample it."""
    directory = options.directory("flame")
    found: dict[int, float] = {}
    with ExitStack() as stack:
        arguments, url = job_of(name, directory, stack)
        urls = [url(number) for number in range(options.tasks + WARM_UP)]
        server = stack.enter_context(
            ConveyorServer(directory / "data", *arguments, code=Sampleable(code.label, code.root))
        )
        accounting.drain(server, urls[:WARM_UP])
        pid = server.child.pid
        samples = directory / "samples.txt"
        drained = accounting.drain(server, urls[WARM_UP:], watched(pid, samples, found))
    spent = shared_out(read_samples(samples.read_text()), found, loop=pid)
    return Profile(options.tasks, drained.seconds, list(spent))


def table(profiles: Mapping[str, Sequence[Profile]]) -> list[Row]:
    """Build the rows: microseconds of CPU a task by part, of each version; the last one's greatest
    part first."""
    costs: dict[str, dict[str, float]] = {}
    for label, taken in profiles.items():
        tasks = sum(one.tasks for one in taken)
        costs[label] = defaultdict(float)
        for one in taken:
            for spent in one.spent:
                costs[label][spent.part] += spent.seconds / tasks * 1e6
    last = list(costs.values())[-1]
    names = sorted({part for one in costs.values() for part in one}, key=lambda part: -last[part])

    def row(name: str, cost: Callable[[Mapping[str, float]], float]) -> Row:
        found = {label: cost(one) for label, one in costs.items()}
        figures: dict[str, Figure] = {f"{label} µs": round(one, 1) for label, one in found.items()}
        if len(found) > 1:
            before, after = found.values()
            figures["×"] = Ratio(after / before) if before else "–"
        return Row(name, figures)

    rows = [row(name, lambda one, name=name: one[name]) for name in names]  # type: ignore[misc]
    return [row("all", lambda one: sum(one.values())), *rows]


def picture(name: str, profiles: Sequence[Profile]) -> str:
    """Draw the stacks of some profiles, in microseconds a task."""
    tasks = sum(one.tasks for one in profiles)
    threads: dict[str, list[Spent]] = defaultdict(list)
    for one in profiles:
        for spent in one.spent:
            threads["the loop's thread" if spent.in_loop else spent.part].append(spent)
    flames = []
    for thread, spents in threads.items():
        stacks = [boxes_of(spent) for spent in spents]
        common = shorten([stack for stack in stacks if stack])
        root = Box(thread, LOOP if spents[0].in_loop else thread)
        flames += [
            Flame((root, *stack[common:]), spent.seconds / tasks * 1e6)
            for spent, stack in zip(spents, stacks, strict=True)
        ]
    whole = sum(flame.cost for flame in flames)
    return svg(
        f"{name}: {whole:.0f} µs of CPU a task",
        f"{tasks:,} tasks, conveyor-dev in one process; each thread's CPU as the kernel counts it, "
        f"shared out by {THREADS_RATE} samples a second",
        "µs a task",
        flames,
    )


def boxes_of(spent: Spent) -> tuple[Box, ...]:
    """Return the boxes of a stack, outermost first, each with the part that it counts for."""
    if not spent.in_loop:
        return tuple(Box(words_of(frame), spent.part) for frame in spent.stack)
    return tuple(
        Box(words_of(frame), cost_of(spent.stack[: place + 1], PARTS, other=LOOP))
        for place, frame in enumerate(spent.stack)
    )


def words_of(frame: Frame) -> str:
    """Return a frame's function and file, without the places where packages are installed."""
    return f"{frame.function} ({_INSTALLED.sub('', frame.file)})"


def versions(revision: str | None, stack: ExitStack) -> list[Code]:
    """Return the versions to sample, this code last. Raises NoSuchCommit."""
    this = Code("this", ROOT)
    found = [this] if revision is None else [stack.enter_context(checkout(revision)), this]
    for code in found:
        code.verify()
    return found


def take(name: str, codes: Sequence[Code], options: Options) -> Rounds[dict[str, Profile]]:
    """Sample every version in turn, several times over."""
    return take_rounds(
        lambda: {code.label: profile(name, code, options) for code in codes},
        wanted=options.repeats,
        label=f"flame {name}",
        describe=lambda turn: "; ".join(
            f"{label} {one.tasks / one.seconds:,.0f} tasks/s, "
            f"{sum(each.seconds for each in one.spent) / one.tasks * 1e6:.0f} µs"
            for label, one in turn.items()
        ),
    )


def main() -> int:
    """Sample, print the table, and write the picture."""
    arguments = flame_parser().parse_args(sys.argv[1:])
    work = fresh_work(arguments.work)
    options = Options(work=work, repeats=arguments.repeats, tasks=arguments.tasks, place="tmpfs")
    facts = machine(work)
    try:
        find_py_spy()
        if not counts_threads():
            raise MissingProgram("a Linux is needed that counts the CPU of threads (schedstat)")
        if arguments.job == "drain":
            find_nginx()
        with ExitStack() as stack:
            codes = versions(arguments.against, stack)
            ((kind, place),) = stack.enter_context(places(options))
            rounds = take(arguments.job, codes, place)
    except (MissingProgram, NoSuchCommit) as problem:
        print(f"bench flame: {problem}", file=sys.stderr)
        return 1
    turns = rounds.quiet if rounds.judged else [one.value for one in rounds.every]
    rows = table({code.label: [turn[code.label] for turn in turns] for code in codes})
    judged = rounds.judged and not arguments.quick
    target = (ROOT / "bench" if judged else work) / f"flame-{arguments.job}.svg"
    target.write_text(picture(arguments.job, [turn["this"] for turn in turns]))
    if arguments.json:
        print_json("flame", rows, facts)
    else:
        say = "" if rounds.judged else f", not judged: all rounds are added up, {QUIET} or not"
        print_wrapped(
            f"{arguments.job} on {kind}, {facts.cpus} × {facts.cpu}, Python {facts.python}: CPU of "
            f"a task by part; {rounds.counted} rounds were quiet{say}"
        )
        print()
        print_table(rows)
    print(f"the flame graph is {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
