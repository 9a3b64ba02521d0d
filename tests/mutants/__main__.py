"""Make small changes of the core one by one, and see whether a test notices."""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.mutants.changes import Mutant
from tests.mutants.core import drawn, equivalents, every_mutant
from tests.mutants.coverage_map import KEPT, CoverageMap, watch
from tests.mutants.report import Tally, described, write
from tests.mutants.trees import Tree
from tests.mutants.trial import Trial, try_mutant

SEED = 15
COUNT = 200
LEAST = 0.95
RESULTS = KEPT / "results.json"


def main() -> int:
    """Run the command; the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = _options()
    draw = drawn(every_mutant(), seed=options.seed, count=options.count)
    trials = {trial.key: trial for trial in _earlier()}
    known = equivalents()
    mutants = [mutant for mutant in draw if options.only in mutant.path]
    if options.survivors:
        done = {trial.key for trial in trials.values() if trial.is_caught}
        done |= {one.key for one in known}
        mutants = [
            mutant for mutant in mutants if mutant.key not in done or mutant.key not in trials
        ]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.lines[0]} {mutant.text}: {mutant.change}")
        return 0
    for number, trial in enumerate(_tried(mutants, options.jobs) if mutants else (), 1):
        trials[trial.key] = trial
        RESULTS.write_bytes(msgspec.json.encode(list(trials.values())))
        print(f"{number}/{len(mutants)} {trial.outcome} {described(trial)} {trial.by}", flush=True)
    tally = Tally([trials[one.key] for one in draw if one.key in trials], known)
    print(tally.summary())
    if options.seed == SEED and not options.only:
        write(tally, seed=options.seed)
    return int(tally.ratio < LEAST)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help=f"mutants drawn ({COUNT})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the draw ({SEED})")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time (2)")
    parser.add_argument("--only", default="", help="try those whose path has this text in it")
    parser.add_argument("--survivors", action="store_true", help="try what was not caught before")
    parser.add_argument("--list", action="store_true", help="print the draw, and try nothing")
    return parser.parse_args()


def _earlier() -> list[Trial]:
    if not RESULTS.exists():
        return []
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[Trial])


def _tried(mutants: Sequence[Mutant], jobs: int) -> Iterator[Trial]:
    """Yield each trial as it ends."""
    with tempfile.TemporaryDirectory(prefix="conveyor-mutants-") as directory:
        trees = [Tree(Path(directory) / str(number)) for number in range(jobs)]
        seen = watch(trees, lambda line: print(line, file=sys.stderr, flush=True))
        ended: queue.SimpleQueue[Trial | BaseException] = queue.SimpleQueue()
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            waiting.put(mutant)
        with ThreadPoolExecutor(jobs) as pool:
            for tree in trees:
                pool.submit(_work, waiting, ended, tree, seen)
            try:
                for _ in mutants:
                    trial = ended.get()
                    if isinstance(trial, BaseException):
                        raise trial
                    yield trial
            finally:
                # The pool waits for its threads, and each of them for its trial.
                while not waiting.empty():
                    waiting.get()
                for tree in trees:
                    tree.end()


def _work(
    waiting: queue.SimpleQueue[Mutant],
    ended: queue.SimpleQueue[Trial | BaseException],
    tree: Tree,
    seen: CoverageMap,
) -> None:
    while True:
        try:
            mutant = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            ended.put(try_mutant(mutant, tree, seen))
        except Exception as error:
            ended.put(error)
            return


if __name__ == "__main__":
    sys.exit(main())
