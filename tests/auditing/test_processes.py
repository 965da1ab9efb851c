"""An audit on several processes: the record of one, written once; misuse and Ctrl-C end all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import pytest
import torch

import bilip
from bilip.auditing.processes import Processes
from bilip.cli import _processes
from bilip.cli._ending import Stop
from bilip.errors import InputError
from in_process import command_line

pytestmark = pytest.mark.process

MODELS = """
import os, pathlib, signal, time
import torch
import bilip

def flow():
    torch.manual_seed(0)
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=8, hidden=(16,), scale="sigmoid"))
    with torch.no_grad():
        for p in flow.parameters():
            p.mul_(2.0)
    return flow

def unseeded():
    return bilip.Flow(bilip.models.real_nvp(2, blocks=2))

def dying():
    made = flow()
    inner = made.bijection.forward
    def forward(x, context=None):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(x, context)
    made.bijection.forward = forward
    return made

def slow():
    made = flow()
    inner = made.bijection.forward
    def forward(x, context=None):
        pathlib.Path("begun").touch()
        time.sleep(0.2)
        return inner(x, context)
    made.bijection.forward = forward
    return made
"""
AUDIT = (
    "--data",
    "x.npy",
    "--ood",
    "uniform",
    "--budget",
    "quick",
    "--probes",
    "reconstruction,likelihood,sampling,consistency,attack,blame,precision",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("share")
    (made / "flows_to_share.py").write_text(MODELS)
    np.save(made / "x.npy", np.random.default_rng(0).normal(size=(400, 2)).astype("float32"))
    return made


def start(folder, *words, several=True, **options):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if several else []
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "bilip", "audit", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def without_times(path):
    record = json.loads(path.read_text())
    del record["created"], record["settings"]["seconds"], record["settings"]["command"]
    return record


def test_two_processes_give_the_record_of_one(folder, monkeypatch, capfd):
    run = start(folder, "flows_to_share:flow", *AUDIT, "--out", "two.json")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others: sums of more threads have another order
    try:
        code, _, err = command_line(monkeypatch, capfd)("audit", "flows_to_share:flow", *AUDIT, "--out", "one.json")
    finally:
        torch.set_num_threads(threads)
    said = run.communicate(timeout=300)
    assert (code, run.returncode) == (0, 0), (err, said)
    one, two = (without_times(folder / name) for name in ("one.json", "two.json"))
    assert len(one["measurements"]) >= 8
    blamed = {m["source"] for m in one["measurements"] if m["probe"] == "blame"}
    assert blamed >= {"x", "uniform"}  # at the samples that other probes found; here on "base" too, the model's own
    assert two == one
    assert said[0].count("wrote two.json") == 1


@pytest.mark.soak
def test_processes_with_different_models_say_so_once(folder):
    run = start(folder, "flows_to_share:unseeded", *AUDIT, "--out", "no.json")
    _, said = run.communicate(timeout=300)
    assert run.returncode
    assert said.count("bilip: audit(distributed=True): the model is not the same in every process") == 1
    assert not (folder / "no.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_all_of_them_measured(folder, number):
    """SIGTERM is what torchrun sends where a process was killed, perhaps before the others have noticed."""
    (folder / "begun").unlink(missing_ok=True)
    run = start(folder, "flows_to_share:slow", *AUDIT, "--out", "stopped.json", start_new_session=True)
    until = time.monotonic() + 120
    while not (folder / "begun").exists() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(run.pid, number)  # as a terminal does: to torchrun, which passes it on, and to every process
    _, said = run.communicate(timeout=300)
    assert run.returncode
    text = "stopped" if number == signal.SIGINT else "another of the 2 processes ended, or they were asked to stop"
    assert said.count(f"bilip: {text}") == said.count("bilip: ") == 1
    assert bilip.AuditRecord.load(folder / "stopped.json").settings["stopped"] is True


def test_several_processes_begin_with_the_longest_tasks_and_divide_them(monkeypatch):
    torch.manual_seed(0)
    flow, x = bilip.Flow(bilip.models.real_nvp(2, blocks=2)), np.random.default_rng(0).normal(size=(64, 2))
    options = {
        "ood": ["uniform"],
        "budget": "quick",
        "probes": "consistency,bounds,gradient_angle,attack,blame,precision",
    }
    begun = []

    def all_of(self, tasks, order, do):
        """One process in the place of several, which takes the tasks in the order that is asked for."""
        order, found = list(order), {}
        assert sorted(order) == list(range(len(tasks)))
        for k in order:
            begun.append((tasks[k][0].name, tasks[k][2]))
            found[k] = do(tasks[k], len(found))
        return [found[k] for k in range(len(tasks))]

    one = bilip.audit(flow, x.astype("float32"), **options)
    monkeypatch.setattr(Processes, "__init__", lambda self, **o: vars(self).update(rank=0, size=2, interrupted=False))
    monkeypatch.setattr(Processes, "gather", lambda self, mine: [mine, mine])
    monkeypatch.setattr(Processes, "all_of", all_of)
    several = bilip.audit(flow, x.astype("float32"), **options)
    assert begun[:4] == [("attack", 0), ("attack", 1), ("attack", 2), ("gradient_angle", None)]
    names = [name for name, _ in begun]
    assert names.index("precision") < names.index("blame")
    assert several.measurements == one.measurements
    assert several.verdicts == one.verdicts


def test_without_a_group_it_says_what_to_do():
    with pytest.raises(InputError, match="torchrun"):
        bilip.audit(bilip.models.real_nvp(2), np.zeros((4, 2), "float32"), distributed=True)


def test_a_rank_that_cannot_be_is_one_line(monkeypatch):
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="RANK < WORLD_SIZE"):
        _processes.Processes.started()


def test_a_process_that_is_left_alone_says_so(monkeypatch):
    """As in a program that torchrun started, and whose first process alone calls the command."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_processes, "_JOIN", timedelta(seconds=1))
    with (
        Stop() as stop,
        pytest.raises(InputError, match=r"did not come within 1 s: RANK=0 and WORLD_SIZE=2.*unset RANK"),
        _processes.processes(stop),
    ):
        pass


def test_the_end_of_another_process_is_said_in_words(monkeypatch):
    pair = Processes()
    pair.size = 2

    def closed(everyone, mine):
        raise RuntimeError("Connection closed by peer [::1]:4242. This may indicate a remote crash ... GLHF")

    monkeypatch.setattr(torch.distributed, "all_gather_object", closed)
    with pytest.raises(
        InputError, match=r"another of the 2 processes ended \(killed, or out of memory\?\).*start all of them again"
    ):
        pair.gather(1)


class Heard:
    """A store in which the first process has said something, or not."""

    def __init__(self, said):
        self.said = said

    def wait(self, keys, time):
        if not self.said:
            raise KeyboardInterrupt  # ended while it waits

    def check(self, keys):
        return self.said


@pytest.mark.parametrize("said", [True, False])
def test_who_is_ended_by_torchrun_repeats_nothing_and_hides_nothing(monkeypatch, said):
    """The first speaks, and torchrun ends the others at once; where the first was killed, another one speaks."""

    def ended(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(_processes.time, "sleep", ended)
    try:
        assert _processes._said_by_the_first(Heard(said)) is said
    except KeyboardInterrupt:
        pytest.fail("it says that it was stopped")


@pytest.mark.soak
def test_a_process_that_is_killed_is_said_in_words(folder):
    (folder / "begun").unlink(missing_ok=True)
    run = start(folder, "flows_to_share:dying", *AUDIT, "--out", "killed.json")
    _, said = run.communicate(timeout=300)
    assert run.returncode
    assert said.count("bilip: another of the 2 processes ended") == 1
    assert "GLHF" not in said


@pytest.mark.soak
def test_a_bad_argument_is_one_line(folder):
    run = start(folder, "flows_to_share:none", *AUDIT, "--out", "no.json")
    _, said = run.communicate(timeout=300)
    assert run.returncode
    assert said.count("bilip: ") == 1


def test_one_process_does_all_tasks_in_the_order_asked_for():
    seen = []

    def do(task, begun):
        seen.append((task, begun))
        return task.upper()

    assert Processes().all_of("abc", [2, 0, 1], do) == ["A", "B", "C"]
    assert seen == [("c", 0), ("a", 1), ("b", 2)]
