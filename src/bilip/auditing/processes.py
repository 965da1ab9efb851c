"""An audit's tasks, divided among the processes of `torch.distributed`."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bilip.errors import InputError, said_by

__all__ = ["Processes"]

T = TypeVar("T")
R = TypeVar("R")


class Processes:
    """Which process does what: whoever is free takes the next task, and all of them get all results.

    A task gives the same numbers whoever does it, so the results do not depend on who was faster.

    Args:
        distributed: Divide tasks among the processes of the default group; else this process does all of them.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        interrupted: Whether Ctrl-C or SIGTERM came while results were exchanged.

    Example:
        >>> Processes().all_of([1, 2, 3], [2, 1, 0], lambda task, begun: 10 * task)
        [10, 20, 30]
    """

    def __init__(self, *, distributed: bool = False) -> None:
        self.rank, self.size, self.interrupted = 0, 1, False
        self._name, self._rounds = "", 0
        if not distributed:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "audit(distributed=True): there is no process group. Call torch.distributed.init_process_group() first, in a program "
                "started by torchrun; `torchrun --nproc-per-node 2 -m bilip audit ...` does both."
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_of(self, tasks: Sequence[T], order: Iterable[int], do: Callable[[T, int], R]) -> list[R]:
        """The results of all tasks, in the order of the tasks.

        Args:
            tasks: The same in every process.
            order: In which they are begun: an index of each.
            do: Called with a task and with how many were begun before it.

        Raises:
            InputError: Another process failed, or is no more; in one that failed its own error is raised.
        """
        queue = list(order)
        if self.size == 1:
            found = {k: do(tasks[k], begun) for begun, k in enumerate(queue)}
            return [found[k] for k in range(len(tasks))]
        self._name = self._name or self.gather(uuid.uuid4().hex)[0]  # that of the first process
        self._rounds += 1  # every process comes through the same ones
        store, key = dist.distributed_c10d._get_default_store(), f"bilip/audit/{self._name}/{self._rounds}"
        mine: dict[int, R] = {}
        failure: BaseException | None = None
        try:
            while (begun := self._added(store, key, 1) - 1) < len(queue):
                mine[queue[begun]] = do(tasks[queue[begun]], begun)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # whoever asked for it asked every process
                raise
            failure = error
            with contextlib.suppress(RuntimeError):
                store.add(key, len(queue))  # nobody begins another one
        if failure is not None:
            with contextlib.suppress(InputError):
                self.gather((mine, said_by(failure)))
            raise failure
        everyone = self.gather((mine, None))
        for rank, (_, said) in enumerate(everyone):
            if said is not None:
                raise InputError(f"process {rank} of {self.size}: {said}")
        found = {k: result for results, _ in everyone for k, result in results.items()}
        return [found[k] for k in range(len(tasks))]

    def gather(self, mine: R) -> list[R]:
        """What every process has, in the order of the processes; an `InputError` if one of them is no more."""
        if self.size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.size
        with self._undisturbed(), self._alive():
            dist.all_gather_object(everyone, mine)
        return everyone

    def _added(self, store: Any, key: str, count: int) -> int:
        with self._alive():
            return store.add(key, count)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Inside, a connection that breaks is said to be what it is: the end of another process."""
        try:
            yield
        except RuntimeError as error:
            raise InputError(
                f"another of the {self.size} processes ended (killed, or out of memory?), seen by process {self.rank}: start all of them "
                "again, with fewer processes or a smaller budget if memory is short."
            ) from error

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM are only noted: a process that leaves an exchange half-way would keep the others waiting."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agree(self, what: str, tensors: Iterable[Any]) -> None:
        """Raise an `InputError` in every process unless all of them hold the same numbers, bit for bit."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                plain = tensor.detach().cpu().contiguous()
                digest.update(str((plain.dtype, tuple(plain.shape))).encode())
                digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
        if len(set(self.gather(digest.hexdigest()))) > 1:
            raise InputError(
                f"audit(distributed=True): the {what} is not the same in every process. Load it from a file, or call "
                "torch.manual_seed first."
            )
