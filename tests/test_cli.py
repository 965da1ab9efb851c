"""The command line as users meet it: what it prints, which exit codes it ends with, which files it leaves."""

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console
import torch

import bilip
from bilip import models
from bilip.cli._ending import Stop, with_exit_codes
from bilip.cli.cure import cure_table
from bilip.cures.result import Attempt, Cure
from bilip.errors import InputError
from bilip.record import USES, AuditRecord
from in_process import command_line

TARGETS = """
import os
import signal
import sys
import torch
from torch import nn
import bilip
from bilip import blocks, models, nets

def additive():
    return bilip.Flow(models.real_nvp(4, blocks=3, hidden=(8,), coupling="additive"))

def affine():
    return bilip.Flow(models.real_nvp(4, blocks=3, hidden=(8,)))

def bare():
    return models.real_nvp(4, blocks=2, hidden=(8,), coupling="additive")

def residual():
    return models.residual_flow(2, blocks=2, hidden=(8,), coefficient=0.5)

def conditional():
    return bilip.Flow(models.real_nvp(4, blocks=2, hidden=(8,), context=2, scale="half_sigmoid"))

def lazy():
    return bilip.Chain(blocks.AdditiveCoupling(nn.LazyLinear(2)), shape=(4,))

def deep():
    model = bare()
    for _ in range(2000):
        model = bilip.Chain(model)
    return model

def inferred():
    with torch.inference_mode():
        return additive()

class Lossy(bilip.Bijection):
    def forward(self, x, context=None):
        return x

    def inverse(self, z, context=None):
        return 1.1 * z

    def forward_and_log_det(self, x, context=None):
        return x, torch.zeros(len(x))

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), torch.zeros(len(z))

def lossy():
    return bilip.Flow(bilip.Chain(Lossy(), shape=(4,)))

class Silent(Lossy):
    def inverse(self, z, context=None):
        raise NotImplementedError("not written yet")

def plain_net():
    return nn.Linear(4, 4)

def nothing():
    return 3

def broken():
    raise RuntimeError("first line\\nsecond line")

def leaves():
    sys.exit("weights are missing")

def needs_an_argument(path):
    return path

class Ends(Lossy):
    def __init__(self, error, after):
        super().__init__()
        self.error, self.left = error, after

    def inverse(self, z, context=None):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return z

def ends(error=SystemExit(0), after=2):
    return bilip.Flow(bilip.Chain(Ends(error, after), shape=(4,)))

def ends_at_once():
    return ends(after=0)

def impatient():
    return ends(KeyboardInterrupt(), 3)

class Exits(Lossy):
    def inverse(self, z, context=None):
        os._exit(0)

def exits():
    return bilip.Flow(bilip.Chain(Exits(), shape=(4,)))

def exits_at_once():
    os._exit(0)

class Quitter(Lossy):
    def forward(self, x, context=None):
        sys.exit(0)

    def leave(self, *args):
        sys.exit(0)

    log_lip = log_lip_inverse = interval = interval_inverse = leave

def empty():
    return models.real_nvp(4, blocks=1).to("meta")

class Elsewhere(Lossy):
    def forward(self, x, context=None):
        return x.to("meta")

class Stubborn(Lossy):
    def train(self, mode=True):
        raise RuntimeError("always in training")

class Speechless(Exception):
    def __str__(self):
        raise ValueError

class Mute(Lossy):
    def forward(self, x, context=None):
        raise Speechless

def terminated():
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)

class Slow(Lossy):
    calls = 0

    def inverse(self, z, context=None):
        import pathlib, time
        Slow.calls += 1
        if Slow.calls == 4:
            pathlib.Path("slow.txt").touch()
            try:
                time.sleep(60)
            except BaseException:
                pass  # swallows the signal
        return z

def slow():
    return bilip.Flow(bilip.Chain(Slow(), shape=(4,)))

class Signals(Lossy):
    calls = 0

    def inverse(self, z, context=None):
        self.calls += 1
        if self.calls == 4:
            signal.raise_signal(signal.SIGTERM)
        return z

class Moves(Lossy):
    def inverse(self, z, context=None):
        elsewhere()
        return z

    def interval(self, *args):
        elsewhere()
        return super().interval(*args)

def elsewhere():
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

def moves():
    return bilip.Flow(bilip.Chain(Moves(), shape=(4,)))

def moved():
    elsewhere()
    return additive()

def moved_bare():
    elsewhere()
    return bare()

def leaves_a_thread():
    import threading, time
    threading.Thread(target=time.sleep, args=(120,)).start()
    return lossy()

def leaves_an_idle_pool():
    import atexit
    from concurrent.futures import ThreadPoolExecutor
    global pool
    pool = ThreadPoolExecutor(1)
    pool.submit(int)
    atexit.register(lambda: print("closed by atexit"))
    return lossy()

class Closes(Lossy):
    def __init__(self, close):
        super().__init__()
        self.close, self.calls = close, 0

    def forward(self, x, context=None):
        self.calls += 1
        if self.calls == 3:
            self.close()
        return x

def closes(close):
    return bilip.Flow(bilip.Chain(Closes(close), shape=(4,)))

def closes_stdout():
    return closes(lambda: sys.stdout.close())

def closes_both():
    return closes(lambda: (os.close(1), os.close(2)))

def without_stdout():
    return closes(lambda: setattr(sys, "stdout", None))

class Tee:
    # as many training scripts put it in the place of standard output
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()

def tees():
    sys.stdout = Tee(sys.stdout)
    return lossy()

def bounds_without_stdout():
    sys.stdout.close()
    return bare()

def regularized():
    held = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 8))
    return blocks.AdditiveCoupling(nn.Sequential(held, nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)))

def signals():
    return bilip.Flow(bilip.Chain(Signals(), shape=(4,)))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("work")
    (path / "cli_targets.py").write_text(TARGETS)
    (path / "cli_fails.py").write_text("1 / 0\n")
    (path / "cli_needs.py").write_text("import surely_not_installed\n")
    models.save(models.real_nvp(4, blocks=3, coupling="additive"), path / "saved")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((700, 4)).astype(np.float32)
    np.save(path / "x.npy", x)
    np.savez(path / "pair.npz", x=x, context=rng.standard_normal((700, 2)).astype(np.float32))
    np.save(path / "empty.npy", x[:0])
    np.save(path / "nan.npy", np.where(np.arange(700)[:, None] == 7, np.nan, x).astype(np.float32))
    np.save(path / "three.npy", x[:, :3])
    np.save(path / "integers.npy", np.arange(256).reshape(64, 4))
    np.save(path / "flat.npy", x[:, 0])
    np.save(path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    whole = (path / "x.npy").read_bytes()
    (path / "cut.npy").write_bytes(whole[: len(whole) // 2])
    (path / "words.txt").write_text("no numbers")
    (path / "link.npy").symlink_to("x.npy")
    record = bilip.audit(models.real_nvp(4, blocks=1), torch.from_numpy(x), budget="quick", probes=["reconstruction"])
    text = record.to_json()
    (path / "good.json").write_text(text)
    (path / "cut.json").write_text(text[: len(text) // 2])
    (path / "newer.json").write_text(text.replace('"schema": 2', '"schema": 3'))
    (path / "bare.json").write_text(text.replace('"seed": 0', '"seed": NaN'))
    (path / "foreign.json").write_text('{"format": "something else"}')
    (path / "binary.json").write_bytes(b"\x80\x81\xff")
    (path / "wrong.json").write_text(text.replace('"values": {', '"values": 3, "v": {'))
    return path


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)  # nothing of the tests belongs there
    return made


@pytest.fixture
def bilip_(folder, monkeypatch, capfd):
    """Run the command line in this process; what comes back is the exit code, stdout and stderr."""
    return command_line(monkeypatch, capfd)


COMMAND = [sys.executable, "-m", "bilip"]


def process(*args, cwd):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, cwd=cwd, timeout=900)


AUDIT = ["audit", "cli_targets:additive", "--data", "x.npy", "--ood", "", "--budget", "quick"]
QUICK = [*AUDIT, "--probes", "consistency,reconstruction,likelihood,log_det"]
SAMPLED = [*AUDIT, "--probes", "consistency,reconstruction,likelihood,log_det,sampling"]


def instead(old, new, base=QUICK):
    return [new if part == old else part for part in base]


def of(target, base=QUICK):
    """The same of another model."""
    return instead("cli_targets:additive", f"cli_targets:{target}", base)


BAD = [
    ("no such module", instead("cli_targets:additive", "absent_module:model"), "No module named 'absent_module'"),
    ("no such function", of("absent"), "has no 'absent'"),
    ("no such folder", instead("cli_targets:additive", "nowhere"), "neither a checkpoint folder nor"),
    ("no module", instead("cli_targets:additive", ":additive"), "neither a checkpoint folder nor"),
    ("a file", instead("cli_targets:additive", "./cli_targets.py:f"), "expected a module, as in cli_targets:f, in"),
    ("module raises", instead("cli_targets:additive", "cli_fails:model"), "'cli_fails' raised ZeroDivisionError"),
    ("module needs", instead("cli_targets:additive", "cli_needs:model"), "No module named 'surely_not_installed'"),
    ("loader raises", of("broken"), "RuntimeError: first line second line"),
    ("loader exits", of("leaves"), "SystemExit: weights are missing"),
    ("loader wants", of("needs_an_argument"), "missing 1 required"),
    ("not a model", of("nothing"), "gave an object of type int"),
    ("no inverse", of("plain_net"), "has no inverse"),
    ("inverse unwritten", of("Silent"), "the inverse of"),
    ("model leaves", of("Quitter"), "SystemExit: 0"),
    ("model is empty", of("empty"), "on the device meta"),
    ("latents are elsewhere", of("Elsewhere"), "gave one on meta"),
    ("always training", of("Stubborn"), "cannot be put into evaluation mode"),
    ("error without words", of("Mute"), "Speechless"),
    ("moved to nowhere", [*QUICK, "--device", "meta"], "on the device meta"),
    ("time", [*QUICK, "--time", "0"], "time=0.0"),
    ("bounds: model leaves", ["bounds", "cli_targets:Quitter"], "ended the program (SystemExit: 0)"),
    ("bounds: model is empty", ["bounds", "cli_targets:empty"], "on the device meta"),
    ("report: device", ["report", "/dev/zero"], "/dev/zero cannot be read (it is a device)"),
    ("data: device", instead("x.npy", "x=/dev/zero"), "not of a kind that is read here"),
    ("folder is no checkpoint", instead("cli_targets:additive", "."), "bilip: "),
    ("no such file", instead("x.npy", "absent.npy"), "absent.npy does not exist"),
    ("no kind of file", instead("x.npy", "words.txt"), "expected .npy"),
    ("empty", instead("x.npy", "empty.npy"), "there is nothing in them"),
    ("no file", instead("x.npy", ""), "--data '' names no file"),
    ("a name without a file", instead("x.npy", "x="), "--data 'x=' names no file"),
    ("nan", instead("x.npy", "nan.npy"), "sample 7 holds NaN or Inf"),
    ("truncated", instead("x.npy", "cut.npy"), "cut.npy cannot be read"),
    ("pickled", instead("x.npy", "objects.npy"), "Python objects"),
    ("integers", instead("x.npy", "integers.npy"), "the data are int64"),
    ("numbers", instead("x.npy", "flat.npy"), "single number"),
    ("features", instead("x.npy", "three.npy"), "(4, 3)"),
    ("shapes", [*QUICK, "--data", "three.npy"], "differ in shape"),
    ("two of one name", [*QUICK, "--data", "x=three.npy"], "two sources are called 'x'"),
    ("no context", of("conditional"), "context"),
    ("budget", instead("quick", "huge"), "'quick', 'standard', 'thorough'"),
    ("probe", [*AUDIT, "--probes", "telepathy"], "unknown probe 'telepathy'"),
    ("use", [*QUICK, "--require", "cooking"], "--require cooking: expected inversion, sampling, likelihood"),
    ("no use", [*QUICK, "--require", ""], "--require names no use: expected some of inversion, sampling"),
    ("no use but a comma", [*QUICK, "--require", " , "], "--require names no use"),
    ("ood", [*QUICK, "--ood", "test"], "neither the name of a source (x) nor a kind of noise"),
    ("ood factor", [*QUICK, "--ood", "uniform:-1"], "positive factor"),
    ("device", [*QUICK, "--device", "moon"], "--device moon"),
    ("seed", [*QUICK, "--seed", "-1"], "seed"),
    ("bits", [*AUDIT, "--bits", "0"], "bits"),
    ("out is a folder", [*QUICK, "--out", "saved"], "it is a folder"),
    ("html nowhere", [*QUICK, "--html", "nowhere/run.html"], "the folder nowhere does not exist"),
    ("below a file", [*QUICK, "--html", "x.npy/run.html"], "x.npy is not a folder"),
    ("report: missing", ["report", "absent.json"], "absent.json cannot be read (No such file"),
    ("report: folder", ["report", "saved"], "saved cannot be read (Is a directory"),
    ("report: cut", ["report", "cut.json", "--html", "left.html"], "may be truncated"),
    ("report: newer", ["report", "newer.json", "--html", "left.html"], "has schema 3; this bilip reads up to 2"),
    ("report: bare", ["report", "bare.json"], "the bare word NaN is not JSON"),
    ("report: foreign", ["report", "foreign.json"], "is not an audit record"),
    ("report: binary", ["report", "binary.json"], "is not a text file"),
    ("report: wrong", ["report", "wrong.json"], "is not a whole audit record"),
    ("report: html", ["report", "good.json", "--html", "nowhere/run.html"], "the folder nowhere does not exist"),
    ("compare", ["compare", "good.json", "newer.json"], "newer.json has schema 3"),
    ("lazy", of("lazy"), "take their shape from the first batch"),
    ("bounds: deep", ["bounds", "cli_targets:deep"], "nested too deeply, or in itself"),
    ("bounds: global", ["bounds", "cli_targets:affine"], "no Lipschitz constant that holds on all of space"),
    ("bounds: box", ["bounds", "cli_targets:affine", "--box", "4", "-4"], "Swap the two"),
    ("bounds: formula", ["bounds", "cli_targets:affine", "--formula", "best"], "'sharp', 'paper'"),
    ("out is data", [*QUICK, "--out", "x.npy"], "--out x.npy would overwrite "),
    ("out is data by a link", [*QUICK, "--html", "link.npy"], "--html link.npy would overwrite "),
    (
        "out is the model",
        instead("cli_targets:additive", "saved", [*QUICK, "--out", "saved/config.json"]),
        "would overwrite saved",
    ),
    (
        "out is the module",
        [*QUICK, "--junit", "cli_targets.py"],
        "--junit cli_targets.py would overwrite cli_targets.py",
    ),
    ("one file for two", [*QUICK, "--out", "r.x", "--junit", "./r.x"], "--junit r.x would overwrite --out r.x"),
    (
        "report: record is html",
        ["report", "good.json", "--html", "good.json"],
        "--html good.json would overwrite good.json",
    ),
    (
        "report: two",
        ["report", "good.json", "--html", "q.x", "--junit", "q.x"],
        "--junit q.x would overwrite --html q.x",
    ),
    ("bounds: model", ["bounds", "saved", "--out", "saved/model.safetensors"], "would overwrite saved"),
    (
        "page: claims",
        ["reproduce", "--page", "--results", ".", "--out", "claims.json"],
        "--out claims.json would overwrite claims.json",
    ),
    ("bounds: out", ["bounds", "cli_targets:bare", "--out", "nowhere/b.json"], "cannot write nowhere/b.json"),
]


@pytest.mark.parametrize(("args", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_one_line_and_exit_code_two(bilip_, folder, args, says):
    if args[0] == "audit":
        args = [*args, *(["--out", "left.json"] if "--out" not in args else [])]
        args = [*args, *(["--html", "left.html"] if "--html" not in args else [])]
    before, x = sorted(os.listdir(folder)), (folder / "x.npy").read_bytes()
    code, out, err = bilip_(*args)
    assert code == 2, err
    assert (folder / "x.npy").read_bytes() == x
    assert err.startswith("bilip: ")
    assert says in err
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert not out
    assert sorted(set(os.listdir(folder)) - {"__pycache__"}) == sorted(set(before) - {"__pycache__"})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (instead("x.npy", "nan.npy"), "sample 7 holds NaN or Inf"),
        (of("broken"), "RuntimeError: first line second line"),
    ],
)
@pytest.mark.process
def test_bad_input_in_a_process_of_its_own(made, args, says):
    result = process(*args, "--out", "process.json", cwd=made)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("bilip: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert not (made / "process.json").exists()


@pytest.mark.parametrize(("target", "code"), [("exits", 1), ("exits_at_once", 2)])
@pytest.mark.process
def test_no_model_leaves_the_gate_with_exit_code_0(made, target, code):
    result = process(*instead("cli_targets:additive", f"cli_targets:{target}"), "--require", "sampling", cwd=made)
    assert result.returncode == code
    assert "SystemExit: 0" in result.stderr


@pytest.mark.parametrize(("required", "code"), [("likelihood", 0), ("inversion", 1)])
@pytest.mark.process
def test_a_thread_that_a_model_leaves_does_not_hang_the_gate(made, required, code):
    args = of("leaves_a_thread")
    run = subprocess.run([*COMMAND, *args, "--require", required], cwd=made, capture_output=True, text=True, timeout=60)
    assert run.returncode == code, run.stderr
    assert "likelihood" in run.stdout


@pytest.mark.process
def test_a_pool_that_waits_for_work_ends_with_the_program_and_what_was_registered_is_called(made):
    run = process(*of("leaves_an_idle_pool"), cwd=made)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("closed by atexit\n")


@pytest.mark.parametrize("target", ["closes_stdout", "closes_both", "without_stdout", "tees"])
@pytest.mark.process
def test_a_model_that_closes_its_streams_is_judged_like_any_other(made, tmp_path, target):
    files = [tmp_path / name for name in ("r.json", "r.html", "r.xml")]
    outputs = [str(part) for pair in zip(("--out", "--html", "--junit"), files, strict=True) for part in pair]
    run = process(*of(target), *outputs, "--require", "inversion", cwd=made)
    assert (run.returncode, run.stderr) == (1, "bilip: required, but inversion is unsafe\n")
    assert "likelihood" in run.stdout
    assert all(file.exists() for file in files)


@pytest.mark.process
def test_bounds_of_a_model_that_closes_standard_output(made):
    run = process("bounds", "cli_targets:bounds_without_stdout", cwd=made)
    assert (run.returncode, run.stderr) == (0, "")
    assert "AdditiveCoupling" in run.stdout


def test_an_output_that_fails_at_the_end_leaves_nothing_half_written(bilip_, folder, monkeypatch):
    """A disk that is full at the last moment: the record stands or stands not."""
    replace = os.replace

    def full(source, target):
        if str(target).endswith("late.html"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    code, _, err = bilip_(*QUICK, "--out", "late.json", "--html", "late.html")
    assert code == 2
    assert err == f"bilip: cannot write {folder / 'late.html'} (No space left on device).\n"
    assert AuditRecord.load("late.json").find("reconstruction")
    assert [name for name in os.listdir(folder) if "late" in name] == ["late.json"]
    (folder / "late.json").unlink()


def test_usage_errors_end_with_two_as_well(bilip_):
    for args in (["audit"], ["audit", "cli_targets:additive"], ["fly"], [*QUICK, "--seed", "one"]):
        code, _, err = bilip_(*args)
        assert code == 2
        assert "Traceback" not in err


def test_an_audit_writes_record_and_page(bilip_, folder):
    args = [*SAMPLED, "--ood", "uniform,copy", "--data", "copy=x.npy"]
    code, out, err = bilip_(*args, "--out", "run.json", "--html", "run.html")
    assert (code, err) == (0, "")
    assert "wrote run.json" in out
    assert "wrote run.html" in out
    record = AuditRecord.load(folder / "run.json")
    assert {s["name"]: s["role"] for s in record.sources} == {"x": "data", "copy": "ood", "uniform": "ood"}
    assert record.settings["command"].startswith("bilip audit cli_targets:additive --data x.npy")
    assert record.model["name"] == "cli_targets:additive"
    assert (folder / "run.html").read_text().startswith("<!doctype html>")
    assert bilip_("report", "run.json")[0] == 0
    code, out, _ = bilip_("compare", "run.json", "run.json", "--markdown")
    assert code == 0
    assert out.startswith("## cli")


@pytest.mark.parametrize("target", ["moves", "moved"])
@pytest.mark.parametrize("data", ["x.npy", "pair.npz"])
def test_a_model_that_leaves_the_working_folder_loses_nothing(bilip_, folder, tmp_path, monkeypatch, target, data):
    """Here for one that is removed."""
    for name in ("x.npy", "cli_targets.py"):
        shutil.copy(folder / name, tmp_path)
    np.savez_compressed(tmp_path / "pair.npz", x=np.load("x.npy"))
    monkeypatch.chdir(tmp_path)
    args = instead("x.npy", data, of(target))
    files = ["--out", "r.json", "--html", "./r.html", "--junit", "r.xml", "--summary", "r.md"]
    code, out, err = bilip_(*args, *files)
    assert (code, err) == (0, "")
    assert "wrote r.json" in out
    assert {"r.json", "r.html", "r.xml", "r.md"} < set(os.listdir(tmp_path))


def test_bounds_and_cures_of_such_a_model(bilip_, folder):
    os.chdir(folder)
    assert bilip_("bounds", "cli_targets:moved_bare", "--out", "moved.json")[0] == 0
    assert (folder / "moved.json").exists()
    os.chdir(folder)
    args = ["--data", "x.npy", "--train", "x.npy", "--ood", "", "--uses", "inversion", "--out", "moved"]
    assert bilip_("cure", "cli_targets:moved", *args)[0] == 0
    assert (folder / "moved" / "cure.json").exists()


def test_a_path_with_an_equals_sign_is_a_path(bilip_, folder):
    (folder / "lr=0.1").mkdir(exist_ok=True)
    np.save(folder / "lr=0.1" / "y.npy", np.ones((3, 4), np.float32))
    code, _, err = bilip_(*instead("x.npy", "lr=0.1/y.npy"), "--out", "run.json")
    assert code == 0, err
    assert [s["name"] for s in AuditRecord.load(folder / "run.json").sources] == ["y"]


@pytest.mark.parametrize(
    ("target", "required", "code", "says"),
    [
        ("additive", "inversion,likelihood,sampling", 0, ""),
        ("additive", "", 0, ""),
        ("lossy", "", 0, ""),
        ("lossy", "inversion", 1, "bilip: required, but inversion is unsafe\n"),
        ("lossy", "likelihood", 0, ""),  # it needs no inverse
        ("additive", "ood-likelihood", 1, "bilip: required, but ood-likelihood is not-measured\n"),
        ("bare", "likelihood,sampling", 1, "bilip: required, but sampling is not-measured\n"),
        ("lossy", "sampling, inversion", 1, "bilip: required, but sampling is unsafe, inversion is unsafe\n"),
    ],
)
def test_the_gate(bilip_, folder, target, required, code, says):
    gate = ["--require", required] if required else []
    found, _, err = bilip_(*of(target, SAMPLED), *gate, "--out", "g.json")
    assert (found, err) == (code, says)
    assert set(AuditRecord.load(folder / "g.json").verdicts) == set(USES)


def test_ctrl_c_leaves_what_was_measured(bilip_, folder):
    args = of("impatient", AUDIT)
    code, _, err = bilip_(*args, "--probes", "reconstruction,sampling", "--out", "part.json", "--html", "part.html")
    assert code == 130
    assert err == "bilip: stopped\n"
    record = AuditRecord.load(folder / "part.json")
    assert record.settings["stopped"] is True
    assert [m.reason for m in record.measurements] == ["the audit was stopped here", "the audit was stopped before"]
    assert record.verdicts["likelihood"].status == "not-measured"
    assert (folder / "part.html").exists()


def test_ctrl_c_before_anything_was_measured(bilip_, monkeypatch, folder):
    def load(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("bilip.cli._arguments.load_model", load)
    assert bilip_(*QUICK, "--out", "early.json") == (130, "", "bilip: stopped\n")
    assert not (folder / "early.json").exists()


@pytest.mark.parametrize(
    ("target", "required", "code"),
    [
        ("ends", "likelihood", 1),
        ("ends", "", 0),
        ("ends_at_once", "sampling", 1),
        ("ends_at_once", "likelihood", 1),
    ],
)
def test_a_model_that_ends_the_program_never_passes_the_gate(bilip_, folder, target, required, code):
    probes = ["--probes", "consistency,reconstruction,log_det"]
    gate = ["--require", required] if required else []
    found, _, err = bilip_(*of(target, AUDIT), *probes, *gate, "--out", "ended.json")
    assert found == code, err
    assert AuditRecord.load(folder / "ended.json").verdicts["likelihood"].status != "safe"
    (folder / "ended.json").unlink()


def signalled(made, target, *signals, probes="reconstruction,sampling,log_det"):
    """Audit in a process that gets signals 50 ms apart once its model has begun; its exit code, stderr and record."""
    for name in ("slow.txt", "term.json"):
        (made / name).unlink(missing_ok=True)
    command = [*COMMAND, *of(target, AUDIT), "--probes", probes, "--out", "term.json"]
    # where tests run in the background, Ctrl-C may be ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=made, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    end = time.monotonic() + 120
    while not (made / "slow.txt").exists() and time.monotonic() < end:
        time.sleep(0.01)
    for each in signals:
        process.send_signal(each)
        time.sleep(0.05)
    _, err = process.communicate(timeout=120)
    return process.returncode, err, AuditRecord.load(made / "term.json")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.process
def test_a_signal_leaves_what_was_measured(made, sent, code):
    """Also where the model swallows the interrupt."""
    found, err, record = signalled(made, "slow", sent)
    assert (found, err) == (code, "bilip: stopped\n")
    assert record.settings["stopped"] is True
    assert any(m.reason == "the audit was stopped before" for m in record.measurements)


def test_a_second_signal_loses_nothing(bilip_, folder, monkeypatch):
    """Here it comes while verdicts are found of what was measured until the first."""
    found = sys.modules["bilip.auditing.audit"].judge

    def judge(*given):
        signal.raise_signal(signal.SIGINT)
        return found(*given)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys.modules["bilip.auditing.audit"], "judge", judge)
    try:
        code, _, err = bilip_(*of("signals", AUDIT), "--probes", "reconstruction,sampling", "--out", "twice.json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (143, "bilip: stopped\n")
    assert AuditRecord.load(folder / "twice.json").settings["stopped"] is True


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    "after", [RecursionError("too deep"), InputError("loading failed"), AttributeError("half loaded")]
)
def test_an_interrupt_that_is_caught_and_becomes_another_error_stops_all_the_same(capsys, sent, code, after):
    """As libraries do while they are imported."""

    def verb() -> None:
        try:
            signal.raise_signal(sent)
        except KeyboardInterrupt:
            raise after from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            with_exit_codes(verb)(traceback=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.value.code, capsys.readouterr().err) == (code, "bilip: stopped\n")


def test_a_third_signal_may_end_the_program(monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    with Stop(keeps=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert not killed
        signal.raise_signal(signal.SIGTERM)
        assert killed == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            stop.check()


@pytest.mark.process
def test_sigterm_ends_every_verb_in_one_line(made):
    result = process("bounds", "cli_targets:terminated", cwd=made)
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "bilip: stopped\n")


def test_time_that_is_over_is_in_the_record_and_closes_the_gate(bilip_, folder):
    code, _, err = bilip_(*QUICK, "--time", "1e-9", "--out", "time.json", "--require", "likelihood")
    assert code == 1
    assert "likelihood is not-measured" in err
    record = AuditRecord.load(folder / "time.json")
    assert {m.reason for m in record.measurements} == {"the time of 1e-09 s was over"}
    assert bilip_(*QUICK, "--time", "1000", "--require", "likelihood")[0] == 0


@pytest.mark.parametrize(
    "args",
    [
        instead("x.npy", "nan.npy"),
        ["report", "cut.json"],
        ["compare", "good.json", "cut.json"],
        ["bounds", "cli_targets:affine"],
        ["demo", "--html", "nowhere/d.html"],
        ["reproduce", "nothing"],
    ],
    ids=lambda args: args[0],
)
def test_every_verb_shows_where_an_error_comes_from_if_asked(bilip_, args):
    code, _, plain = bilip_(*args)
    assert code == 2
    assert plain.count("\n") == 1
    code, _, full = bilip_(*args, "--traceback")
    assert code == 2
    assert full.startswith("Traceback (most recent call last)")
    assert full.endswith(plain)
    assert "--traceback" in bilip_(args[0], "--help")[1]


def test_an_error_that_nobody_foresaw_is_one_line_and_has_a_code_of_its_own(bilip_, monkeypatch):
    def fault(*args):
        raise ZeroDivisionError("deep\ninside \x1b[31m")

    monkeypatch.setattr(AuditRecord, "load", fault)
    code, _, err = bilip_("report", "good.json")
    assert code == 3
    assert (
        err
        == "bilip: ZeroDivisionError: deep inside [31m. Nobody foresaw this: --traceback shows where it comes from\n"
    )


def test_a_table_without_figures(bilip_, monkeypatch):
    from bilip.recipes import Outcome, find

    outcome = Outcome(find("coupling_depth"), "quick", Path("runs"), (), (), (), 0.0)
    monkeypatch.setattr("bilip.cli.reproduce._run", lambda *_: outcome)
    assert bilip_("reproduce", "coupling_depth")[1].endswith(f"wrote {Path('runs', 'ours.json')}\n")


def test_no_memory_is_no_fault_of_bilip(bilip_, monkeypatch):
    monkeypatch.setattr(AuditRecord, "load", lambda _: torch.empty(2**60, dtype=torch.uint8))
    code, _, err = bilip_("report", "good.json")
    assert code == 2
    assert err.startswith("bilip: out of memory (")


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
@pytest.mark.parametrize("verb", [QUICK, ["demo"], ["report", "good.json"]], ids=lambda args: args[0])
def test_what_a_page_needs_is_said_before_anything_is_measured(bilip_, folder, monkeypatch, missing, verb):
    def measured(*args, **options):
        raise AssertionError("it was measured first")

    monkeypatch.setattr(bilip, "audit", measured)
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = bilip_(*verb, "--html", "page.html")
    assert (code, out) == (2, "")
    assert f"the HTML page needs {missing}: pip install 'bilip[report]'" in err
    assert not (folder / "page.html").exists()


def test_a_checkpoint_without_checksum_is_a_note_of_one_line(bilip_, folder):
    document = json.loads((folder / "saved" / "config.json").read_text())
    old = folder / "old"
    old.mkdir(exist_ok=True)
    (old / "config.json").write_text(json.dumps({**document, "version": 1}))
    (old / "model.safetensors").write_bytes((folder / "saved" / "model.safetensors").read_bytes())
    code, _, err = bilip_("bounds", "old")
    assert code == 0
    assert err == "bilip: note: old has no checksums, as in bilip 0.1: damage would go unnoticed. Save it again.\n"


def test_contexts_come_with_the_file(bilip_, folder):
    args = instead("x.npy", "pair.npz", of("conditional"))
    code, _, err = bilip_(*args, "--require", "likelihood")
    assert code == 0, err


@pytest.mark.parametrize(
    ("target", "kind", "count"),
    [
        ("cli_targets:additive", "AdditiveCoupling", 3),
        ("saved", "AdditiveCoupling", 3),
        ("cli_targets:residual", "Residual", 2),
    ],
)
def test_global_bounds_of_a_function_and_of_a_checkpoint(bilip_, target, kind, count):
    code, out, err = bilip_("bounds", target)
    assert code == 0, err
    assert out.count(kind) == count
    assert "total F" in out


def test_bounds_are_those_of_a_model_in_evaluation_mode(bilip_):
    """As a constructor leaves it a model is in training mode; nobody can call `.eval()` on the command line."""
    code, out, err = bilip_("bounds", "cli_targets:regularized")
    assert (code, err) == (0, "")
    assert "AdditiveCoupling" in out
    assert "cannot be put into evaluation mode" in bilip_("bounds", "cli_targets:Stubborn")[2]


def test_bounds_of_a_model_made_in_inference_mode(bilip_):
    assert bilip_("bounds", "cli_targets:inferred")[0] == 0


def test_boxes_formulas_and_json(bilip_, folder):
    code, _, err = bilip_("bounds", "cli_targets:affine", "--box", "-4", "4", "--formula", "paper", "--out", "b.json")
    assert code == 0, err
    document = json.loads((folder / "b.json").read_text())
    assert len(document["blocks"]) == 3
    assert document["formula"] == "paper"
    assert bilip_("bounds", "cli_targets:affine", "--latent", "-1", "1")[0] == 0


@pytest.mark.slow
def test_demo(folder, bilip_, monkeypatch):
    """All of it but the size: the three flows that come with the package, their table and their page."""
    few = functools.partial(bilip.audit, probes=["consistency", "reconstruction", "likelihood", "log_det", "sampling"])
    monkeypatch.setattr(bilip, "audit", few)
    code, out, err = bilip_("demo", "--html", "demo.html")
    assert code == 0, err
    for name in ("affine (0, 1)", "affine (0.5, 1)", "residual 0.8", "affine (0, 1), cured"):
        assert name in out
    assert "Cured " in out
    page = (folder / "demo.html").read_text()
    assert page.count("checkerboard") > 3
    assert bilip_("demo", "--html", "nowhere/demo.html")[0] == 2


def test_version(bilip_):
    assert bilip_("--version")[:2] == (0, f"bilip {bilip.__version__}\n")


@pytest.mark.parametrize("args", [["--help"], ["audit", "--help"], ["report", "good.json", "--html", "r.html"]])
@pytest.mark.process
def test_help_and_report_start_without_torch(made, args):
    code = (
        "import sys\n"
        "from bilip.record import AuditRecord\n"
        "from bilip.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "found = {'torch', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *args], cwd=made, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "args", [["--help"], ["report", "good.json"], ["bounds", "cli_targets:additive", "--box", "-1", "1"]]
)
@pytest.mark.process
def test_a_terminal_without_all_letters(made, args, encoding):
    """As of a cron job, or of a Windows console: what it cannot show is replaced."""
    run, environment = [sys.executable, "-m", "bilip", *args], {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(run, cwd=made, capture_output=True, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode(encoding)


@pytest.mark.process
def test_a_reader_that_leaves_early_is_no_error():
    """`bilip reproduce --list | head -1`: what is not read is not missed."""
    run = f"{sys.executable} -m bilip reproduce --list | head -c 1"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=120)
    assert len(done.stdout) == 1
    assert "bilip:" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "files"),
    [
        ([*QUICK, "--html", "e.html", "--junit", "e.xml", "--summary", "e.md"], ["e.html", "e.xml", "e.md"]),
        (["report", "good.json", "--html", "e.html", "--junit", "e.xml"], ["e.html", "e.xml"]),
        (["report", "good.json", "--markdown", "--junit", "e.xml"], ["e.xml"]),
        (["bounds", "cli_targets:additive", "--box", "-1", "1", "--out", "e.json"], ["e.json"]),
    ],
)
@pytest.mark.process
def test_a_reader_that_leaves_early_loses_no_file(made, args, files):
    """`bilip audit ... --html page.html | head -1`."""
    read, write = os.pipe()
    os.close(read)
    subprocess.run([*COMMAND, *args], cwd=made, stdout=write, stderr=subprocess.PIPE, timeout=900)
    os.close(write)
    for name in files:
        assert (made / name).stat().st_size
        (made / name).unlink()


def test_brackets_in_names_are_no_markup(bilip_, folder):
    """`runs/[lr]` is a folder like any other; rich would take it for a style."""
    shutil.copytree(folder / "saved", folder / "run[/lr]")
    (folder / "[").mkdir()
    code, out, err = bilip_("bounds", "run[/lr]", "--out", "[/b].json")
    assert (code, err) == (0, "")
    assert "run[/lr]: proven" in out
    assert "wrote [/b].json" in out


def test_what_was_tried_may_hold_brackets():
    attempt = Attempt("settings", "x[/y]", "failed", reason="not[/this]")
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(cure_table(Cure("not cured", None, "", (), None, None, (attempt,))))  # type: ignore[arg-type]
    assert "x[/y]: not[/this]" in console.file.getvalue()
