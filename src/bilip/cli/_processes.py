"""A command that `torchrun` started several times: one of the processes speaks and writes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import typer

from bilip.cli._ending import Stop, Terminated, last_words
from bilip.errors import InputError

__all__ = ["Processes", "processes"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WAIT = timedelta(seconds=10)
_JOIN = timedelta(minutes=5)


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    @classmethod
    def started(cls) -> Processes:
        """What the environment says: `torchrun` sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
        if any(name not in os.environ for name in _NEEDED):
            return cls()
        try:
            found = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        except ValueError:
            found = cls(-1, 0)
        if not 0 <= found.rank < found.size:
            raise InputError(
                f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r} in the environment: expected whole numbers, "
                "0 <= RANK < WORLD_SIZE. Start several processes with torchrun, or unset both."
            )
        return found


@contextlib.contextmanager
def processes(stop: Stop) -> Iterator[Processes]:
    """Inside, the processes that were started together are a group of `torch.distributed`, each with a GPU of its own if there are any.

    What goes wrong in all of them is said once, by the first. The first Ctrl-C or SIGTERM interrupts, later ones do not: `torchrun` passes
    on what the terminal has already sent to every process, while they put together what was measured.
    """
    here = Processes.started()
    if here.size == 1:
        yield here
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", here.rank)) % torch.cuda.device_count())
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=_JOIN)))
        store.set(f"bilip/here/{rank}", "")
        store.wait([f"bilip/here/{k}" for k in range(size)], _JOIN)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the other processes did not come within {_JOIN.total_seconds():.0f} s: RANK={here.rank} and WORLD_SIZE={here.size} in the "
            "environment say that this is one of several. Start all of them with torchrun, or unset RANK to audit in one process."
        ) from error
    # Only small results travel. Whoever is done waits as long as the others need.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=30))
    stop.patient = True
    try:
        yield here
    except BaseException as error:
        stop.late = True  # a signal that comes now must not take the place of what is to be said
        if isinstance(error, typer.Exit):
            raise
        if isinstance(error, Terminated):
            # torchrun sends it where a process was killed, and may be seen before the connection that broke.
            error = Terminated(f"another of the {here.size} processes ended, or they were asked to stop (SIGTERM)")
        text, code = last_words(error)
        with contextlib.suppress(RuntimeError):  # the process that kept the store is no more
            store.set(f"bilip/said/{here.rank}", text)
        if here.first or not _said_by_the_first(store):
            raise error from None
        raise typer.Exit(code) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _said_by_the_first(store) -> bool:  # type: ignore[no-untyped-def]
    """Whether the first process failed too, and says why; also where this one is ended meanwhile."""
    try:
        try:
            store.wait(["bilip/said/0"], _WAIT)
            time.sleep(1)  # torchrun ends the others as soon as one has failed: the first speaks before
        except KeyboardInterrupt:
            return store.check(["bilip/said/0"])
    except RuntimeError:
        return False
    return True
