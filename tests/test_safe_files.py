"""Every reader meets a pipe, a device, a folder, a file without end or a spoilt one in place of its file: one line, and no waiting."""

import functools
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import bilip
import fuzz
from bilip import models
from bilip.cli._arguments import require_writable
from bilip.data import as_source
from bilip.data.images import load_plain
from bilip.errors import BilipError, InputError, RecordError
from bilip.record import AuditRecord, read_json, write_aside
from bilip.record.files import UNSEALED, is_whole, open_regular, read_file, seal
from bilip.training import read_state, save_state


def checkpoint(folder):
    models.save(models.real_nvp(2, blocks=1, hidden=(4,)), folder)


READERS = {
    "record": ("run.json", lambda f: AuditRecord().save(f / "run.json"), lambda f: AuditRecord.load(f / "run.json")),
    "json": ("run.json", lambda f: AuditRecord().save(f / "run.json"), lambda f: read_json(f / "run.json")),
    "config": ("config.json", checkpoint, models.load),
    "weights": ("model.safetensors", checkpoint, models.load),
    "state": (
        "s.safetensors",
        lambda f: save_state(f / "s.safetensors", {}, {}),
        lambda f: read_state(f / "s.safetensors"),
    ),
    "npy": ("x.npy", lambda f: np.save(f / "x.npy", np.ones((3, 2))), lambda f: as_source("x", f / "x.npy")),
    "npz": ("x.npz", lambda f: np.savez(f / "x.npz", x=np.ones((3, 2))), lambda f: as_source("x", f / "x.npz")),
    "safetensors": (
        "x.safetensors",
        lambda f: save_file({"x": torch.ones(3, 2)}, f / "x.safetensors"),
        lambda f: as_source("x", f / "x.safetensors"),
    ),
    "pickle": ("batch", lambda f: (f / "batch").write_bytes(b"\x80\x02}q\x00."), lambda f: load_plain(f / "batch")),
}
STANDINS = {
    "pipe": (os.mkfifo, "it is a pipe"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "symbolic links|does not exist"),
    "nothing": (lambda path: None, "does not exist|No such file"),
    "no permission to be a file": (lambda path: path.symlink_to("/dev/null"), "it is a device"),
}


@pytest.fixture
def impatient():
    """A read that waits for ever is a failure, not a hang."""

    def late(number, frame):
        raise TimeoutError("the reader waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("standin", STANDINS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_without_waiting(reader, standin, tmp_path, impatient):
    name, write, read = READERS[reader]
    write(tmp_path)
    read(tmp_path)
    (tmp_path / name).unlink()
    make, says = STANDINS[standin]
    make(tmp_path / name)
    with pytest.raises(BilipError, match=says) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", ["record", "config", "weights", "state", "pickle"])
def test_a_folder_is_no_file(reader, tmp_path):
    name, write, read = READERS[reader]
    write(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(BilipError, match="Is a directory"):
        read(tmp_path)


def test_links_to_files_are_followed(tmp_path):
    for name, write, read in READERS.values():
        folder = tmp_path / name.replace(".", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder)
        (folder / name).rename(folder / "elsewhere")
        (folder / name).symlink_to("elsewhere")
        read(folder)


def test_the_limit_is_in_the_sentence(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"x" * 1001)
    assert read_file(path, most=1001) == b"x" * 1001
    with pytest.raises(InputError, match=r"long has 1,001 bytes: at most 1,000 are read here\."):
        read_file(path, most=1000)
    with pytest.raises(RecordError, match="1,001 bytes"):
        open_regular(path, most=1000, error=RecordError)


def test_a_file_that_hides_its_length_is_cut_off():
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("there is no such file here")
    assert os.stat("/proc/self/maps").st_size == 0
    with pytest.raises(InputError, match="more than 100 bytes"):
        read_file("/proc/self/maps", most=100)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""])
def test_names_that_no_file_can_have(name):
    for read in (AuditRecord.load, models.load, read_state, load_plain):
        with pytest.raises(BilipError):
            read(name)


def test_a_pipe_that_nobody_reads_is_not_written_to(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("bilip.record.files._write_through.__defaults__", (0.1,))
    began = time.monotonic()
    with pytest.raises(InputError, match="cannot write"):
        write_aside(pipe, "words")
    assert time.monotonic() - began < 20  # it would have waited for ever


def test_two_readers_at_once_get_the_same_bytes(tmp_path):
    path, found = tmp_path / "x", []
    path.write_bytes(os.urandom(3 * 2**20))
    threads = [threading.Thread(target=lambda: found.append(read_file(path, most=2**23))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [path.read_bytes()] * 4


def test_a_seal_covers_every_bit_and_itself():
    whole = seal(b'{"sha256": "' + UNSEALED.encode() + b'", "more": 1}\n')
    mark = whole[12:76].decode()
    assert is_whole(whole, mark)
    for place in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        found = bytes(broken[12:76]).decode("latin1")
        assert not is_whole(bytes(broken), found)
        assert not is_whole(bytes(broken), mark)
    for mark in (None, 3, "", "0" * 64, "é" * 64):
        assert not is_whole(whole, mark)
    with pytest.raises(RecordError, match="no place for a checksum"):
        seal(b"{}")


def test_an_audit_of_a_pipe_is_one_line(tmp_path, impatient):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(InputError, match=r"source 'test': .*x.npy cannot be read \(it is a pipe\)"):
        bilip.audit(models.real_nvp(2, blocks=1), {"test": tmp_path / "x.npy"})


def test_threads_that_write_one_file_never_mix(tmp_path):
    """Each writes aside under a name of its own."""
    path, contents = tmp_path / "shared", [bytes([k]) * 2**21 for k in range(4)]
    write_aside(path, contents[0])
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(path.read_bytes())

    def write(content):
        for _ in range(20):
            write_aside(path, content)

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    done.set()
    reader.join()
    assert all(data in contents for data in seen)
    assert os.listdir(tmp_path) == ["shared"]


def test_a_link_is_written_through_to_the_file_it_leads_to(tmp_path):
    (tmp_path / "far").mkdir()
    real, link, ahead = tmp_path / "far" / "real.json", tmp_path / "link.json", tmp_path / "ahead.json"
    real.write_text("old")
    link.symlink_to("far/real.json")
    ahead.symlink_to("far/not yet there.json")
    for path in (link, ahead):
        write_aside(path, "new")
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert real.read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["not yet there.json", "real.json"]


@pytest.mark.parametrize("mode", ["ab", "wb"])
@pytest.mark.parametrize("inside", [False, True], ids=["link", "link to a link"])
def test_what_leads_to_an_open_file_is_written_to_and_not_replaced(tmp_path, inside, mode):
    """As `/dev/stdout` does, where standard output goes to a file: whoever may write to /dev would lose it for everybody."""
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("there is no such folder here")
    with open(tmp_path / "output", mode) as output:
        output.write(b"before\n")
        output.flush()
        stdout = tmp_path / "stdout"
        stdout.symlink_to(f"/proc/self/fd/{output.fileno()}")
        if inside:
            stdout = tmp_path / "other"
            stdout.symlink_to("stdout")
        write_aside(stdout, "content\n")
        assert stdout.is_symlink()
        output.write(b"after\n")
    assert (tmp_path / "output").read_text() == "before\ncontent\nafter\n"


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_bad_input_of_every_kind_ends_in_one_line(kind, tmp_path, monkeypatch):
    """A few cases of each kind of `benchmarks/fuzz.py`, in this process."""
    monkeypatch.chdir(tmp_path)
    few = functools.partial(bilip.audit, probes=["reconstruction", "log_det", "sampling"])
    monkeypatch.setattr(bilip, "audit", few if kind == "record" else bilip.audit)
    before = torch.random.get_rng_state()
    torch.manual_seed(0)
    home = tmp_path / "home"
    home.mkdir()
    subject = fuzz.KINDS[kind](home)
    count = {"record": 8, "checkpoint": 50, "state": 8, "data": 50, "command": 6, "model": 2}[kind]
    found = []
    for k in range(count - 1, 2 * count - 1) if kind in ("checkpoint", "data") else range(count):
        folder = tmp_path / str(k)
        folder.mkdir()
        found.append(subject.run(k, random.Random(f"{kind} 0 {k}"), folder))
        os.chdir(tmp_path)
        if fuzz.is_whole(k):
            assert found[-1] == "accepted"
    torch.random.set_rng_state(before)
    assert set(found) <= {"accepted", "refused"}, [text for text in found if text not in ("accepted", "refused")]
    assert "refused" in found or kind == "model"


def test_pipes_and_devices_are_writable_where_their_folder_is_not(monkeypatch, tmp_path):
    """As for everybody but root: /dev is not theirs, `--out /dev/stdout` is."""
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_dir())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", "/dev/stdout", "/dev/fd/1"):
        if os.path.exists(path):
            require_writable(Path(path))
    with pytest.raises(InputError, match="no permission"):
        require_writable(tmp_path / "new.json")


def test_a_link_to_nowhere_is_refused_before_the_work(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("nowhere/there.json")
    with pytest.raises(InputError, match="nowhere does not exist"):
        require_writable(link)
    (tmp_path / "nowhere").mkdir()
    require_writable(link)
