"""What a run writes down while it trains: CSV files, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilip.errors import CheckpointError, InputError
from bilip.record.files import open_regular, read_file

__all__ = ["Log", "read_log"]

KINDS = ("train", "evaluation")
MOST = 2**32  # bytes of a log


class Log:
    """Rows of numbers, in one CSV file for each kind, and as scalars for TensorBoard.

    A resumed run cuts the files back to where its checkpoint was, so that they end as those of a run that was never stopped.

    Args:
        folder: Where the files go; `None` writes nothing, for all processes but the first.
        sizes: Bytes of each file at the checkpoint; `None` begins anew.
        step: The step of the checkpoint.
        tensorboard: Whether to write for TensorBoard as well.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Log(folder, tensorboard=False)
        ...     log.write("train", 1, {"loss": 2.0})
        ...     log.close()
        ...     read_log(folder, "train")
        {'step': [1.0], 'loss': [2.0]}
    """

    def __init__(
        self,
        folder: str | Path | None,
        sizes: Mapping[str, int] | None = None,
        step: int = 0,
        *,
        tensorboard: bool = True,
    ) -> None:
        self.folder, self._board = folder, None
        self._columns: dict[str, list[str]] = {}
        self.sizes = dict(sizes or {})
        if folder is None:
            return
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / f"{kind}.csv" for kind in KINDS):
            if path.stem in self.sizes:
                self._cut(path, self.sizes[path.stem])
            elif path.exists():
                with open_regular(path, most=MOST) as file:
                    if file.read(5) != b"step,":
                        raise InputError(
                            f"{path} is not a log of this loop, and would be overwritten. Choose another folder."
                        )
                path.unlink()
        self._board = _board(self.folder / "tensorboard", step) if tensorboard else None

    @staticmethod
    def _cut(path: Path, size: int) -> None:
        if not path.is_file() or path.stat().st_size < size:
            raise CheckpointError(
                f"{path} is shorter than its checkpoint says. Restore it, or delete the folder to begin anew."
            )
        with path.open("r+b") as file:
            file.truncate(size)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add a row; all rows of a kind have the same names."""
        if self.folder is None:
            return
        path = Path(self.folder) / f"{kind}.csv"
        names = ["step", *values]
        if kind not in self._columns and path.exists():
            with open_regular(path, most=MOST) as file:
                self._columns[kind] = next(csv.reader([file.readline().decode("utf-8", "replace")]), [])
        if self._columns.setdefault(kind, names) != names:
            raise CheckpointError(
                f"{path} has the columns {', '.join(self._columns[kind])}; now there are {', '.join(names)}. Give the same names each "
                "time; for other ones choose another folder."
            )
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not path.exists():
            writer.writerow(names)
        writer.writerow([step, *(repr(float(value)) for value in values.values())])
        with path.open("ab") as file:
            file.write(text.getvalue().encode())
            self.sizes[kind] = file.tell()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish the files."""
        if self._board is not None:
            self._board.close()


def read_log(folder: str | Path, kind: str) -> dict[str, list[float]]:
    """The columns of a CSV file that a run wrote; empty if it wrote none.

    Raises:
        CheckpointError: The file is damaged or foreign.
    """
    path = Path(folder) / f"{kind}.csv"
    if not path.exists():
        return {}
    data = read_file(path, most=MOST, error=CheckpointError)
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8"), newline="")))
        return {name: [float(row[k]) for row in rows[1:]] for k, name in enumerate(rows[0] if rows else ())}
    except (ValueError, IndexError, csv.Error) as error:
        raise CheckpointError(
            f"{path} is not a log of this loop ({error}). It may be truncated: copy it again."
        ) from error


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
