"""What the searches for counterexamples share: cases in several processes, a line of progress, and the JSON that is left."""

from __future__ import annotations

import collections
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from _measure import about, options, write

__all__ = ["Found", "main", "search"]


class Found(Protocol):
    """What some cases gave."""

    findings: list[dict]

    @property
    def count(self) -> int:
        """How many comparisons they were."""
        ...

    def add(self, other: Self) -> None:
        """Take the results of other cases in."""
        ...


F = TypeVar("F", bound=Found)


def search(
    run: Callable[[Any], F],
    tasks: Iterable[Any],
    total: F,
    enough: int,
    *,
    jobs: int = 1,
    progress: Callable[[F], None] = lambda found: None,
) -> F:
    """Run tasks until there are enough comparisons; the same ones whatever the number of processes."""
    left = iter(tasks)
    if jobs == 1:
        while total.count < enough:
            total.add(run(next(left)))
            progress(total)
        return total
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = collections.deque(pool.submit(run, next(left)) for _ in range(4 * jobs))
        while total.count < enough:
            total.add(waiting.popleft().result())
            progress(total)
            waiting.append(pool.submit(run, next(left)))
        for task in waiting:
            task.cancel()
    return total


def main(
    what: str,
    question: str,
    text: str | None,
    out: str,
    find: Callable[..., F],
    describe: Callable[[F], dict[str, Any]],
    versions: dict[str, str] | None = None,
) -> int:
    """The command line of a search; the exit code is 1 if something was found.

    Args:
        what: What is counted, as in comparisons.
        question: The question, for the file.
        text: What `--help` shows.
        out: The file that is written by default.
        find: Called with the number, `seed`, `jobs` and `progress`.
        describe: What the file says of the results.
        versions: Of libraries that matter beside torch.
    """
    parser = options(text, device=None, out=out, seed=0)
    parser.add_argument(f"--{what}", dest="number", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    args = parser.parse_args()
    start, shown, told = time.time(), 0.0, 0

    def progress(found: F) -> None:
        nonlocal shown, told
        if time.time() - shown > 10:
            for finding in found.findings[told:]:
                print(finding)
            shown, told = time.time(), len(found.findings)
            print(f"{found.count} {what}, {told} findings, {shown - start:.0f} s", flush=True)

    found = find(args.number, seed=args.seed, jobs=args.jobs, progress=progress)
    script = Path(sys.argv[0]).name
    document = {
        "question": question,
        "command": f"python benchmarks/{script} --{what} {args.number} --seed {args.seed}",
        "environment": about("cpu") | (versions or {}),
        "seconds": round(time.time() - start),
        "jobs": args.jobs,
        what: found.count,
        **describe(found),
        "found": len(found.findings),
        "findings": found.findings[:200],
    }
    write(args.out, document)
    print(f"{found.count} {what} in {document['seconds']} s: {len(found.findings)} findings; wrote {args.out}")
    for finding in found.findings[:20]:
        print(finding)
    return 1 if found.findings else 0
