"""Pieces side by side: the clock, SIGTERM, and errors."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bilip.errors import BilipError, InputError, Stopped
from bilip.recipes.pool import side_by_side


@dataclass(frozen=True)
class Piece:
    title: str
    folder: Path
    deadline: float


def work(piece, progress):
    """Ends, or fails, or goes on until the deadline or SIGTERM and then saves: in a process of its own."""
    if piece.title == "short":
        (piece.folder / "short").write_text("done")
        return
    if piece.title == "wrong":
        while not (piece.folder / "long").exists():
            time.sleep(0.01)
        raise InputError("this one is wrong")
    ended = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    (piece.folder / piece.title).write_text("began")
    while not ended and time.time() < piece.deadline:
        time.sleep(0.01)
    (piece.folder / piece.title).write_text("saved")
    raise Stopped("stopped")


def run(folder, titles, deadline=None, shown=lambda *words: None):
    pieces = [Piece(title, folder, deadline or time.time() + 100) for title in titles]
    side_by_side(work, pieces, 2, shown, deadline)


def test_at_the_deadline_all_save_and_none_is_begun(tmp_path):
    with pytest.raises(Stopped, match="the time is up"):
        run(tmp_path, ["long", "short", "longer"], deadline=time.time() + 6)
    assert (tmp_path / "short").read_text() == "done"
    assert (tmp_path / "long").read_text() == "saved"
    if (tmp_path / "longer").exists():  # on a slow machine it is not begun
        assert (tmp_path / "longer").read_text() == "saved"
    with pytest.raises(Stopped):
        run(tmp_path, ["last"], deadline=time.time() - 1)
    assert not (tmp_path / "last").exists()


def test_sigterm_lets_all_save(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def end():
        while not all((tmp_path / name).exists() for name in ("long", "longer")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run(tmp_path, ["long", "longer"])
    assert [(tmp_path / name).read_text() for name in ("long", "longer")] == ["saved", "saved"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_one_lets_the_others_save(tmp_path):
    with pytest.raises(BilipError, match="this one is wrong"):
        run(tmp_path, ["long", "wrong"])
    assert (tmp_path / "long").read_text() == "saved"


def test_an_interrupt_of_the_first_process_alone_lets_the_others_save(tmp_path, monkeypatch):
    """Ctrl-C in a terminal reaches all of them; `kill -INT` and a notebook reach one."""
    monkeypatch.setattr("bilip.recipes.pool.GRACE", 0.1)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def end():
        while not (tmp_path / "long").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=end, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, ["long"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "long").read_text() == "saved"
