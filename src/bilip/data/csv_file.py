"""Rows of a table of numbers in a text file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bilip.data.rows import ArrayRows
from bilip.errors import InputError
from bilip.record.files import open_regular

__all__ = ["open_csv"]

MOST = 2**31  # bytes of a file that is read as a whole
CHUNK = 4096


def open_csv(path: Path) -> ArrayRows:
    """The columns of a `.csv` file as features, in float64; commas, semicolons or tabs stand between them.

    The first line is a header if none of its cells is a number. Every other cell has to be one.

    Raises:
        InputError: A column holds text, a cell is empty, or a line has more or fewer cells than the first; one line that says where.
    """
    with open_regular(path, most=MOST) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        try:
            first = file.readline(2**20)
            file.seek(0)
            mark = max(",;\t", key=first.count)
            return ArrayRows(_numbers(path, csv.reader(file, delimiter=mark)))
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a text in UTF-8: save it as a CSV file of numbers.") from error
        except csv.Error as error:
            raise InputError(f"{path} cannot be read as a CSV file: {error}.") from error


def _numbers(path: Path, lines: Iterator[list[str]]) -> np.ndarray:
    names: list[str] | None = None
    width, chunks, rows = 0, [], []
    for k, cells in enumerate(lines, 1):
        if not cells or (len(cells) == 1 and not cells[0].strip()):
            continue  # a blank line
        if not width:
            width = len(cells)
            if not any(_is_number(cell) for cell in cells):
                names = [cell.strip() for cell in cells]
                continue
        if len(cells) != width:
            raise InputError(f"{path}, line {k}: {len(cells)} cells; the first line has {width}.")
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError:
            raise _wrong(path, k, cells, names) from None
        if len(rows) == CHUNK:
            chunks.append(np.array(rows))
            rows = []
    if rows or chunks:
        chunks += [np.array(rows)] if rows else []
        return np.concatenate(chunks)
    raise InputError(f"{path} holds no numbers: expected one sample in each line.")


def _wrong(path: Path, line: int, cells: list[str], names: list[str] | None) -> InputError:
    at = next(i for i, cell in enumerate(cells) if not _is_number(cell))
    column = repr(names[at]) if names and names[at] else str(at + 1)
    if not cells[at].strip():
        return InputError(f"{path}, line {line}: the cell of column {column} is empty. Fill it, or leave the line out.")
    return InputError(
        f"{path}: column {column} holds text ({cells[at].strip()!r:.40} in line {line}). Leave the column out, or write it as numbers."
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
