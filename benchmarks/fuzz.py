"""Does bad input end in one line? Mutated records, checkpoints, training states and data files, odd command lines, bad models.

    python benchmarks/fuzz.py --jobs 2 --out results/robustness/fuzz.json
    python benchmarks/fuzz.py --cases 0.1 --only state

Each case is a function of its kind and number alone, and runs in a worker process. It may be accepted or refused with a `BilipError` (on
the command line: one line and an exit code that the docs know). Anything else that is raised is a *traceback*; a case that takes
more than 10 s of processor time, or waits for 10 s, is a *hang* (on a busy machine the clock says nothing); a file with one flipped bit that loads is an *accepted flip*. Every 50th file is
whole, and has to be accepted. The program ends with 1 if there is any traceback, hang or accepted flip.
"""

# ruff: noqa: E501 (tables of odd values)
from __future__ import annotations

import contextlib
import copy
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bilip
from _measure import about, options, write
from bilip import cli, models
from bilip.data import as_source, cifar10, noise
from bilip.errors import BilipError
from bilip.record import AuditRecord
from bilip.record.files import UNSEALED, seal

COUNTS = {"record": 1000, "checkpoint": 1000, "state": 1000, "data": 500, "command": 500, "model": 100}
LIMIT = 10.0  # seconds
ODD = [
    None, True, False, 0, -1, 1, 2, 10**7, 10**12, -(10**12), 2**63, 10**300, 10**400, 0.5, -0.0, 1e308, 5e-324, "", "x", "nan", "inf",
    "\\inf", "a" * 5000, "\ud800", "\x1b[31m", "<script>alert(1)</script>", "../../etc/passwd", "漢字", [], {}, [[]], [None], {"": None},
    [1] * 1000, {"a": {"b": {"c": 1}}}, ["x", 1, None], "real_nvp", "flow", "float32", "safe", "F8_E4M3", [2, 2], [-1, 4], [True, 2],
]  # fmt: skip


SHAPES = (
    "(True, 2)",
    "(40, 3, 10**9)",
    "(10, 2, 7)",
    "(-40, -3)",
    "()",
    "(0, 3)",
    "(2**70, 3)",
    "(40, 0)",
    "(120,)",
    "4",
)
DTYPES = ("<f4", "<f8", ">f4", "|O", "<c8", "|V4", "<M8[s]", "<U1", "|u1", "<f2", "<f16", "|b1", "(" * 80 + "4", "<i4")


# ---- mutations


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit turned."""
    place = rng.randrange(8 * len(data))
    return data[: place // 8] + bytes([data[place // 8] ^ (1 << place % 8)]) + data[place // 8 + 1 :]


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Cut, doubled, filled, moved: what a bad copy does to a file."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + rng.choice([1, 8, 64, 4096]))
        way = rng.randrange(7)
        if way == 0:
            data = data[:a]
        elif way == 1:
            data = data[:a] + data[b:]
        elif way == 2:
            data = data[:b] + data[a:]
        elif way == 3:
            data = data[:a] + bytes(b - a) + data[b:]
        elif way == 4:
            data = data[:a] + rng.randbytes(b - a) + data[b:]
        elif way == 5:
            odd = rng.choice([b"{", b"}", b"[", b'"', b"\\", b"NaN", b"-", b"\xff", b"9" * 500, b"[" * 700])
            data = data[:a] + odd + data[a:]
        else:
            data = data[a:]
        if not data:
            return data
    return data


def changed(value: Any, rng: random.Random) -> Any:
    """A document with one to three values replaced, removed, renamed, moved or buried."""
    value = copy.deepcopy(value)
    for left in reversed(range(rng.choice([1, 1, 1, 2, 3]))):
        place, path = value, []
        while isinstance(place, (dict, list)) and place and (len(path) < 1 or rng.random() < 0.8):
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            path.append((place, key))
            place = place[key]
        if not path:
            return rng.choice(ODD)
        holder, key = path[-1]
        way = rng.random()
        if way < 0.65:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif way < 0.78:
            del holder[key]
        elif way < 0.86 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "0", "-1", key + "s", "__class__"])] = holder.pop(key)
        elif way < 0.92:
            for _ in range(rng.choice([3, 40, 600]) if left == 0 else 3):
                holder[key] = rng.choice([[holder[key]], {"a": holder[key]}])
        else:
            holder[key] = copy.deepcopy(rng.choice([k for k, _ in path]))
    return value


def written(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def pack(header: Any, numbers: bytes) -> bytes:
    text = written(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + numbers


def sealed(data: bytes) -> bytes:
    """With a checksum that fits, where there is a place for one."""
    return seal(data) if UNSEALED.encode() in data else data


def odd_file(path: Path, rng: random.Random) -> None:
    """Something else of this name: nothing, a folder, a pipe, a link to an endless device or to itself."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    way = rng.randrange(9)
    if way == 0:
        path.mkdir()
    elif way == 1:
        os.mkfifo(path)
    elif way < 5:
        path.symlink_to(["/dev/zero", "/dev/urandom", "/dev/null"][way - 2])
    elif way == 5:
        path.symlink_to(path.name)
    elif way == 6:
        path.symlink_to("/proc/self/mem")
    elif way == 7:
        path.write_bytes(b"")


def is_whole(k: int) -> bool:
    """Whether a case is a file without a fault, which has to be accepted."""
    return k % 50 == 49


# ---- kinds of input; each case returns "accepted", "refused", or a complaint


def refused_or(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except BilipError as error:
            return "refused" if "\n" not in str(error) else f"an error of several lines: {error}"
    return "accepted"


def command_line(*words: str) -> tuple[int, str, str]:
    """Run `bilip` in this process; exit code, standard output and standard error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["bilip", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def ended_well(words: list[str], codes: tuple[int, ...] = (0, 1, 2, 130)) -> str:
    code, out, err = command_line(*words)
    if code not in codes or "Traceback" in err + out:
        return f"{words} ended with {code}: {err[-500:]}"
    return "refused" if code else "accepted"


class Record:
    """Mutated audit records, shown as a table, as Markdown or as a page."""

    def __init__(self, folder: Path) -> None:
        flow = bilip.Flow(models.real_nvp(4, blocks=2, hidden=(8,)))
        record = bilip.audit(flow, torch.randn(64, 4), ood=["uniform"], budget="quick", seed=0)
        settings = {**record.settings, "seconds": 1.0}
        self.whole = replace(record, created="2026-01-01T00:00:00+00:00", settings=settings).to_json().encode()

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        path = folder / "run.json"
        way = rng.random()
        if is_whole(k):
            path.write_bytes(self.whole)
        elif way < 0.2:
            path.write_bytes(flipped(self.whole, rng))
        elif way < 0.45:
            path.write_bytes(scrambled(self.whole, rng))
        elif way < 0.97:
            path.write_bytes(written(changed(json.loads(self.whole), rng)))
        else:
            odd_file(path, rng)
        words = ["report", str(path)]
        if k % 3 == 1:
            words.append("--markdown")
        elif k % 8 == 0:
            words += ["--html", str(folder / "page.html")]
        elif k % 7 == 0:
            words = ["compare", str(path), str(path)]
        return ended_well(words, (0, 2))


class Checkpoint:
    """Mutated checkpoints of this version and of 0.1; changes inside are sealed again, so that the checksum does not hide them."""

    def __init__(self, folder: Path) -> None:
        made = [
            models.real_nvp(4, blocks=2, hidden=(8,), actnorm=True),
            models.flow(models.glow((1, 4, 4), levels=1, blocks=1, hidden=4)),
            models.residual_flow(3, blocks=2, hidden=(4,)),
        ]
        self.whole = []
        for k, model in enumerate(made):
            models.save(model, folder / str(k))
            header, numbers = unpack((folder / str(k) / "model.safetensors").read_bytes())
            about = json.loads(header["__metadata__"]["bilip"]) | {"sha256": UNSEALED}
            # the library writes them in any order
            header["__metadata__"] = {"format": "pt", "bilip": json.dumps(about)}
            self.whole.append(((folder / str(k) / "config.json").read_bytes(), seal(pack(header, numbers))))

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        config, weights = rng.choice(self.whole)
        flip = k % 3 == 0 and not is_whole(k)
        if is_whole(k):
            config, weights = self._changed(config, weights, rng, whole=True)
        elif flip:
            spot = rng.randrange(len(config) + len(weights))
            config, weights = (flipped(config, rng), weights) if spot < len(config) else (config, flipped(weights, rng))
        else:
            config, weights = self._changed(config, weights, rng)
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        if not flip and not is_whole(k) and rng.random() < 0.05:
            odd_file(folder / rng.choice(["config.json", "model.safetensors"]), rng)
        found = refused_or(lambda: models.load(folder))
        return "a flipped bit was accepted" if flip and found == "accepted" else found

    @staticmethod
    def _changed(config: bytes, weights: bytes, rng: random.Random, whole: bool = False) -> tuple[bytes, bytes]:
        way, (header, numbers) = rng.random(), unpack(weights)
        document = json.loads(config)
        if way < 0.25 and not whole:
            return (scrambled(config, rng), weights) if rng.random() < 0.4 else (config, scrambled(weights, rng))
        old = rng.random() < 0.5
        if way < 0.65 and not whole:
            document = changed(document, rng)
        elif not whole:
            header = changed(header, rng)
        if old:  # as 0.1 wrote them
            if isinstance(document, dict):
                document.pop("sha256", None)
                document["version"] = 1 if document.get("version") == 2 else document.get("version")
            if isinstance(header, dict):
                header["__metadata__"] = {"format": "pt"}
            return written(document), pack(header, numbers)
        if isinstance(document, dict) and "sha256" in document:
            document["sha256"] = UNSEALED
        if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
            header["__metadata__"]["bilip"] = json.dumps(document)
        return sealed(written(document)), sealed(pack(header, numbers))


class State:
    """Mutated states of training, of this version and of 0.1, from which a run goes on."""

    def __init__(self, folder: Path) -> None:
        self._train(folder / "run", 3)
        self.folder = folder / "run"
        self.whole = (self.folder / "last.safetensors").read_bytes()

    @staticmethod
    def _train(folder: Path, steps: int) -> None:
        from bilip.data import checkerboard
        from bilip.objectives import Likelihood
        from bilip.regularizers import FiniteDifference
        from bilip.training import Settings, Task, train

        torch.manual_seed(0)
        penalty = FiniteDifference(0.01, every=2)
        model = bilip.Flow(bilip.Reversible(models.real_nvp(2, blocks=2, hidden=(4,), actnorm=True)))
        task = Task(model, lambda draw: (checkerboard(8, draw("data")),), Likelihood((penalty,)), None, (penalty,))
        settings = Settings(steps=steps, device="cpu", ema=0.9, log_every=2, save_every=3)
        train(task, settings, folder, progress=lambda *_: None)

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        shutil.copy(self.folder / "train.csv", folder / "train.csv")
        path, flip = folder / "last.safetensors", k % 3 == 0 and not is_whole(k)
        if flip:
            path.write_bytes(flipped(self.whole, rng))
        else:
            path.write_bytes(self._changed(rng, is_whole(k)))
            if rng.random() < 0.03 and not is_whole(k):
                odd_file(path, rng)
        found = refused_or(lambda: self._train(folder, 4))
        return "a flipped bit was accepted" if flip and found == "accepted" else found

    def _changed(self, rng: random.Random, whole: bool = False) -> bytes:
        way, (header, numbers) = rng.random(), unpack(self.whole)
        if way < 0.2 and not whole:
            return scrambled(self.whole, rng)
        facts = json.loads(header["__metadata__"]["bilip"])
        if way < 0.75 and not whole:
            facts = changed(facts, rng)
        if rng.random() < 0.5 and isinstance(facts, dict):
            facts.pop("sha256", None)
            facts["version"] = 1 if facts.get("version") == 2 else facts.get("version")
        elif isinstance(facts, dict) and "sha256" in facts:
            facts["sha256"] = UNSEALED
        header["__metadata__"] = {"bilip": json.dumps(facts)}
        if way >= 0.75 and not whole:
            header = changed(header, rng)
        return sealed(pack(header, numbers))


class Data:
    """Mutated files of data, read to the end."""

    def __init__(self, folder: Path) -> None:
        from PIL import Image
        from safetensors.numpy import save

        rng = np.random.default_rng(0)
        x = rng.standard_normal((40, 3)).astype(np.float32)
        pixels = rng.integers(0, 255, (6, 8, 8, 3), np.uint8)
        self.whole: list[tuple[str, bytes]] = []
        for order in "CF":
            file = io.BytesIO()
            np.save(file, np.asarray(x, order=order))
            self.whole.append(("x.npy", file.getvalue()))
        for function in (np.savez, np.savez_compressed):
            file = io.BytesIO()
            function(file, x=x, context=x[:, :1])
            self.whole.append(("x.npz", file.getvalue()))
        file = io.BytesIO()
        np.savez(file, x=np.asfortranarray(x))
        self.whole.append(("x.npz", file.getvalue()))
        self.whole += [("x.safetensors", save({"x": x, "context": x[:, :1].copy()}))] * 2
        text = io.StringIO()
        np.savetxt(text, x, delimiter=",", header="a,b,c", comments="")
        file = io.BytesIO()
        torch.save({"x": torch.from_numpy(x), "context": torch.from_numpy(x[:, :1].copy())}, file)
        self.whole += [("x.csv", text.getvalue().encode()), ("x.pt", file.getvalue())] * 2
        for form in ("PNG", "JPEG"):
            file = io.BytesIO()
            Image.fromarray(pixels[0]).save(file, form)
            self.whole.append((f"a.{form.lower()}", file.getvalue()))
        batch = {b"data": rng.integers(0, 255, (4, 3072), np.uint8).astype(np.uint8), b"labels": [0, 1, 2, 3]}
        self.whole.append(("test_batch", pickle.dumps(batch, protocol=2)))
        self.whole.append(("test_batch.bin", bytes([3] + [255] * 3072)))

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        name, data = rng.choice(self.whole)
        path = folder / name
        way = rng.random()
        if is_whole(k):
            pass
        elif name == "x.npy" and way < 0.4:
            data = self._header(data, rng)
        elif name == "x.npz" and way < 0.4:
            data = self._archive(data, rng)
        elif name == "x.safetensors" and way < 0.5:
            header, numbers = unpack(data)
            data = pack(changed(header, rng), numbers)
        else:
            data = flipped(data, rng) if way < 0.6 else scrambled(data, rng)
        path.write_bytes(data)
        if rng.random() < 0.06 and not is_whole(k):
            odd_file(path, rng)
        if name.startswith("test_batch"):
            return refused_or(lambda: cifar10(folder, split="test"))
        return refused_or(lambda: self._read(folder if name.startswith("a.") else path))

    @staticmethod
    def _read(path: Path) -> None:
        source = as_source("x", path)
        source.check(256)
        list(noise("uniform", source, count=8).batches(8))

    @staticmethod
    def _header(data: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(data[8:10], "little")
        text = data[10 : 10 + length].decode("latin1")
        shape, kind = rng.choice(SHAPES), rng.choice(DTYPES)
        if rng.random() < 0.6:
            text = text.replace("(40, 3)", shape)
        if rng.random() < 0.5:
            text = text.replace("<f4", kind)
        if rng.random() < 0.3:
            text = text.replace("False", rng.choice(["True", "1", "None", "[]"]))
        text = text.rstrip() + "\n"
        return data[:8] + len(text).to_bytes(2, "little") + text.encode("latin1") + data[10 + length :]

    @classmethod
    def _archive(cls, data: bytes, rng: random.Random) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", rng.choice([0, 8, 12, 14])) as new:
            for name in old.namelist():
                part = old.read(name)
                part = cls._header(part, rng) if rng.random() < 0.5 else scrambled(part, rng)
                new.writestr(rng.choice([name, name, name, "../x.npy", "y.npy", "x"]), part)
        whole = bytearray(out.getvalue())
        if rng.random() < 0.3:  # the flag that says that a member is encrypted
            for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
                at = whole.find(mark)
                if at >= 0:
                    whole[at + place] |= 1
        return bytes(whole)


TARGETS = """
import bilip
from bilip import models

def good():
    return bilip.Flow(models.real_nvp(4, blocks=1, hidden=(4,), coupling="additive"))

def bare():
    return models.real_nvp(4, blocks=1, hidden=(4,))

def nothing():
    return None

model = good()
"""


class Command:
    """Command lines put together from words that are right, wrong and odd."""

    ODD = ("", "-1", "0", "nan", "1e999", "x" * 5000, "a\nb", "\x1b[31m", "é", "=", "a=b", "=x.npy", ",", ",,",
           "--", "-", "/dev/null", "/dev/zero", "pipe.npy", "nowhere/x", ".", "..", "words.txt", "saved", "run.json", "x.npy", "99999999999999999999", "True", "None", "~", "*")  # fmt: skip
    MODELS = ("fuzz_targets:good", "fuzz_targets:bare", "fuzz_targets:model", "fuzz_targets:nothing",
              "saved", "fuzz_targets:", ":", "os:getcwd")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "fuzz_targets.py").write_text(TARGETS)
        np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))
        (folder / "words.txt").write_text("no numbers")
        models.save(models.real_nvp(4, blocks=1, hidden=(4,)), folder / "saved")
        AuditRecord(model={"name": "flow"}).save(folder / "run.json")
        os.mkfifo(folder / "pipe.npy")

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        for name in os.listdir(self.folder):
            (folder / name).symlink_to(self.folder / name)
        os.chdir(folder)
        if rng.random() < 0.2:
            (folder / "pyproject.toml").write_bytes(self._settings(rng))
        return ended_well(self._words(rng))

    @staticmethod
    def _settings(rng: random.Random) -> bytes:
        """Settings of a project, most of them wrong somewhere."""
        keys = {
            "sources": ('{a = "x.npy"}', '["x.npy"]', "{a = 3}", '{a = "/dev/zero"}', "{}"),
            "ood": ('["uniform"]', '"uniform"', "[3]", '["nothing"]'),
            "limits": ("{relative = 1e-3}", "{relativ = 1}", '{relative = "x"}', "{relative = nan}", "3"),
            "require": ('["sampling"]', '["flying"]', '"sampling"', "[[]]"),
            "not_measured": ('"fail"', '"maybe"', "true"),
            "budget": ('"quick"', '"huge"', "0"),
            "time": ("3", "-1", "nan", '"3"', "1e999"),
            "tyme": ("3",),
        }
        lines = [f"{key} = {rng.choice(keys[key])}" for key in rng.sample(list(keys), rng.randrange(1, 4))]
        text = "\n".join(["[tool.bilip]", *lines, ""]).encode()
        return text if rng.random() < 0.8 else scrambled(text, rng)

    def _words(self, rng: random.Random) -> list[str]:
        def pick(*good: str) -> str:
            return rng.choice(good) if rng.random() < 0.7 else rng.choice(self.ODD)

        verb = rng.choice(
            ["audit"] * 6
            + ["report", "report", "compare", "bounds", "bounds", "reproduce", "demo", "fly", "--version", ""]
        )
        words = [verb, *(self._audit(rng, pick) if verb == "audit" else self._others(verb, rng, pick))]
        if rng.random() < 0.1:
            words.insert(rng.randrange(len(words) + 1), rng.choice(self.ODD))
        if rng.random() < 0.1:
            del words[rng.randrange(len(words))]
        words = [word.replace("\0", "") for word in words]
        if words and words[0] == "demo" and "nowhere/d.html" not in words:  # that would be a whole demo
            words = ["demo", "--budget", "none", "--html", "nowhere/d.html"]
        if words and words[0] == "reproduce" and not set(words) & {"--list", "huge", "nothing", "words.txt", "moon"}:
            words += ["--size", "huge"]
        return words

    def _audit(self, rng: random.Random, pick: Callable[..., str]) -> list[str]:
        """What follows `audit`."""
        words = [pick(*self.MODELS), "--data", pick("x.npy", "x.npy", "a=x.npy", "b=saved")]
        words += ["--budget", pick("quick")]
        words += ["--probes", pick("reconstruction", "consistency", "reconstruction,log_det")]
        words += ["--time", pick("3", "0.01")]
        for option, good in (
            ("--ood", ("", "uniform", "uniform:2", "scaled:1e30", "gaussian,rademacher")),
            ("--require", ("sampling", "likelihood")), ("--bits", ("8", "33")), ("--device", ("cpu", "meta", "cuda:99", "mps")),
            ("--junit", ("j.xml", "nowhere/j.xml")), ("--summary", ("s.md",)), ("--not-measured", ("fail", "pass")),
            ("--limit", ("relative=1e-3", "bad_share=0.1", "relativ=1")), ("--seed", ("0", "7")), ("--out", ("out.json", "nowhere/o.json")), ("--html", ("nowhere/o.html",)), ("--data", ("c=x.npy",)),
        ):  # fmt: skip
            if rng.random() < 0.3:
                words += [option, pick(*good)]
        return words

    def _others(self, verb: str, rng: random.Random, pick: Callable[..., str]) -> list[str]:
        """What follows another verb."""
        words: list[str] = []
        if verb in ("report", "compare"):
            words += [pick("run.json")] + ([pick("run.json")] if verb == "compare" else [])
            words += rng.choice([[], ["--markdown"], ["--html", "nowhere/x.html"], ["--what"]])
        elif verb == "bounds":
            words += [pick(*self.MODELS)]
            words += rng.choice(
                [[], ["--box", pick("-4", "4"), pick("4", "-4", "inf")], ["--latent", pick("-1"), pick("1")]]
            )
            words += rng.choice([[], ["--formula", pick("sharp", "paper")], ["--out", pick("b.json")]])
        elif verb == "reproduce":
            words += rng.choice([["--list"], [pick("nothing")], ["coupling_depth", "--size", "huge"], ["coupling_depth", "--set", pick("depth=x")],
                                 ["coupling_depth", "--seeds", pick("a", "-1")], ["coupling_depth", "--out", "words.txt"], ["checkerboard", "--device", "moon"]])  # fmt: skip
        elif verb == "demo":
            words += ["--html", "nowhere/d.html"]
        return words


class Model:
    """Models that fail in every way that comes to mind, at a random call; an audit never ends with 0 and without a record."""

    FAILURES = ("exit 0", "exit 1", "exit text", "base exception", "ctrl-c", "raise", "recursion", "memory", "none", "list", "rows", "columns", "flat",
                "scalar", "nan", "inf", "complex", "integer", "double", "empty", "text", "numpy", "in place", "stop iteration", "generator",
                "assertion", "huge text", "meta", "grow", "not implemented", "system error", "unicode")  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        x = np.random.default_rng(0).standard_normal((700, 4))  # enough for `safe`
        np.save(folder / "x.npy", x.astype(np.float32))

    def run(self, k: int, rng: random.Random, folder: Path) -> str:
        failure = self.FAILURES[k % len(self.FAILURES)]
        where, call = rng.choice(["forward", "inverse", "log_det", "init"]), rng.choice([0, 0, 1, 2, 4, 8])
        (folder / "fuzz_model.py").write_text(
            f"import fuzz\n\ndef make():\n    return fuzz.bad_model({failure!r}, {where!r}, {call})\n"
        )
        sys.modules.pop("fuzz_model", None)
        os.chdir(folder)
        out = folder / "run.json"
        words = ["audit", "fuzz_model:make", "--data", str(self.folder / "x.npy"), "--ood", ""]
        words += ["--budget", "quick", "--time", "4", "--out", str(out)]
        words += ["--probes", "consistency,reconstruction,likelihood,log_det,blame,sampling,precision,gradient_angle"]
        found = ended_well([*words, "--require", "likelihood"])
        if found == "accepted" and (not out.exists() or (folder / "ended").exists()):
            return f"{failure} in {where}, call {call}: exit code 0 without a record, or although the model ended the program"
        return found


def bad_model(failure: str, where: str, call: int) -> Any:
    """A flow that is the identity until one of its methods is called for the `call`-th time."""

    class Bad(bilip.Bijection):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, device="meta" if failure == "meta" else None))
            if where == "init":
                fail(self.weight)

        def _there(self, name: str, x: Any) -> Any:
            Bad.calls += name == where
            return fail(x) if name == where and Bad.calls > call else x

        def forward(self, x: Any, context: Any = None) -> Any:
            return self._there("forward", x * self.weight)

        def inverse(self, z: Any, context: Any = None) -> Any:
            return self._there("inverse", z / self.weight)

        def forward_and_log_det(self, x: Any, context: Any = None) -> Any:
            return self.forward(x), self._there("log_det", self.weight.log().sum() + 0 * x[:, 0])

        def inverse_and_log_det(self, z: Any, context: Any = None) -> Any:
            return self.inverse(z), self._there("log_det", -self.weight.log().sum() + 0 * z[:, 0])

    class Own(BaseException):
        pass

    def fail(x: Any) -> Any:
        raised = {
            "exit 0": SystemExit(0), "exit 1": SystemExit(1), "exit text": SystemExit("enough"), "base exception": Own("own"),
            "ctrl-c": KeyboardInterrupt(), "raise": ValueError("several\nlines"), "memory": MemoryError(), "stop iteration": StopIteration(1),
            "assertion": AssertionError(), "huge text": RuntimeError("long " * 10**5), "not implemented": NotImplementedError(),
            "system error": SystemError("odd"), "unicode": ValueError("\ud800 \x1b[31m"), "generator": GeneratorExit(),
        }  # fmt: skip
        if failure in raised:
            if not isinstance(raised[failure], (Exception, GeneratorExit)):
                Path("ended").touch()
            raise raised[failure]
        if failure == "recursion":
            return fail(x)
        made = {
            "none": lambda: None, "list": lambda: [x], "rows": lambda: x[:1], "columns": lambda: x[..., :1], "flat": lambda: x.flatten(),
            "scalar": lambda: x.sum(), "nan": lambda: x * float("nan"), "inf": lambda: x / 0, "complex": lambda: x.to(torch.complex64),
            "integer": lambda: x.long(), "double": lambda: x.double(), "empty": lambda: x[:0], "text": lambda: "x", "numpy": lambda: x.detach().numpy(),
            "in place": lambda: x.detach().mul_(2), "grow": lambda: x.repeat(2, *[1] * (x.ndim - 1)), "meta": lambda: x,
        }  # fmt: skip
        return made[failure]()

    return bilip.Flow(bilip.Chain(Bad(), shape=(4,)))


KINDS = {"record": Record, "checkpoint": Checkpoint, "state": State, "data": Data, "command": Command, "model": Model}


# ---- workers


def work(kind: str, seed: int, pipe: Connection) -> None:
    """Take case numbers, send back outcomes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for the life of the process)
    home = tempfile.mkdtemp(prefix="bilip-fuzz-")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            subject = KINDS[kind](Path(home))
        pipe.send("ready")
        while (k := pipe.recv()) is not None:
            rng = random.Random(f"{kind} {seed} {k}")
            with tempfile.TemporaryDirectory(prefix="bilip-fuzz-") as folder:
                try:
                    found = subject.run(k, rng, Path(folder))
                    if is_whole(k) and kind not in ("command", "model") and found != "accepted":
                        found = f"a whole file was not accepted: {found}"
                except BaseException:
                    found = traceback.format_exc()
                finally:
                    os.chdir("/")
            pipe.send(found)
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Worker:
    """A process that does one case at a time, and is replaced when it hangs."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.case = kind, seed, None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(self.kind, self.seed, theirs), daemon=True)
        self.process.start()
        theirs.close()
        if self.pipe.recv() != "ready":
            raise RuntimeError("a worker did not start")

    def give(self, case: int) -> None:
        self.case, self.began, self.looked, self.waited = case, time.monotonic(), time.monotonic(), 0.0
        self.cpu = self._spent()[0]
        self.pipe.send(case)

    def outcome(self) -> str | None:
        """What came of the case; None while it runs."""
        if self.pipe.poll(0.002):
            try:
                return self.pipe.recv()
            except EOFError:
                self.process.join()
                code = self.process.exitcode
                self._start()
                return f"the process died with exit code {code}"
        cpu, waits = self._spent()
        now = time.monotonic()
        self.waited, self.looked = self.waited + waits * (now - self.looked), now
        if cpu - self.cpu > LIMIT or self.waited > LIMIT:
            self.process.kill()
            self.process.join()
            self._start()
            return f"hang: {cpu - self.cpu:.1f} s of processor time, {self.waited:.1f} s of waiting"
        return None

    def _spent(self) -> tuple[float, bool]:
        """Seconds of processor time, and whether the process waits for something else than a processor."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] != "R"
        except (OSError, IndexError):  # not on every system: then the clock decides
            return 0.0, True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


def fuzz(kind: str, cases: int, seed: int, jobs: int) -> dict[str, Any]:
    """All cases of one kind."""
    began, counts = time.monotonic(), {"accepted": 0, "refused": 0}
    tracebacks, hangs, flips, slowest = [], [], [], 0.0
    workers = [Worker(kind, seed) for _ in range(jobs)]
    waiting, running = list(range(cases)), 0
    while waiting or running:
        for worker in workers:
            if worker.case is None and waiting:
                worker.give(waiting.pop(0))
                running += 1
            elif worker.case is not None and (found := worker.outcome()) is not None:
                slowest = max(slowest, time.monotonic() - worker.began)
                if found in counts:
                    counts[found] += 1
                else:
                    kinds = {"hang": hangs, "a flipped bit": flips}
                    kept = next((kept for kind, kept in kinds.items() if found.startswith(kind)), tracebacks)
                    kept.append({"case": worker.case, "found": found[-1500:]})
                    print(f"{kind} {worker.case}: {found[-1500:]}", file=sys.stderr)
                worker.case, running = None, running - 1
    for worker in workers:
        worker.close()
    return {
        "cases": cases,
        **counts,
        "tracebacks": len(tracebacks),
        "hangs": len(hangs),
        "accepted_flips": len(flips),
        "slowest_seconds": round(slowest, 2),
        "seconds": round(time.monotonic() - began, 1),
        "examples": [*tracebacks[:20], *hangs[:20], *flips[:20]],
    }


def main() -> None:
    parser = options(__doc__, device=None, jobs=1, seed=0)
    parser.add_argument("--cases", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--only", default="", help="kinds, comma-separated")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else list(COUNTS)
    found: dict[str, Any] = {}
    for kind in kinds:
        found[kind] = fuzz(kind, max(1, round(args.cases * COUNTS[kind])), args.seed, args.jobs)
        print(kind, {key: value for key, value in found[kind].items() if key != "examples"}, flush=True)
    bad = sum(one[key] for one in found.values() for key in ("tracebacks", "hangs", "accepted_flips"))
    command = f"python benchmarks/fuzz.py --jobs {args.jobs} --cases {args.cases:g} --seed {args.seed}"
    write(args.out, {"command": command, "limit_seconds": LIMIT, "kinds": found, "environment": about("cpu")})
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
