"""The training loop: schedules, exact resume, several processes, and what it refuses."""

import csv
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from bilip import Flow, Reversible, models
from bilip.blocks import ActNorm
from bilip.blocks.diagonal import shared_statistics
from bilip.data import seed_of
from bilip.errors import CheckpointError, InputError, TrainingDiverged
from bilip.objectives import Likelihood
from bilip.regularizers import FiniteDifference
from bilip.training import Average, Settings, Task, load_weights, read_log, read_state, save_state, train
from bilip.training.loop import alone
from training.runs import make_settings, make_task, run, silent

PROGRAM = Path(__file__).with_name("runs.py")
FILES = ("last.safetensors", "best.safetensors", "train.csv", "evaluation.csv")


def program(folder, steps=100, devices=1, kind="all"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), str(steps), str(devices), kind],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-2000:]
    return out


def train_in(folder, task=None, **changes):
    """Train, the small flow if nothing else is given."""
    return train(task or make_task("flow"), make_settings(**changes), folder, progress=silent)


def changed(change):
    """The small flow, with `change(found, step)` in the place of what its loss has found."""
    base = make_task("flow")
    return Task(base.model, base.batch, lambda model, step, x: change(base.loss(model, step, x), step))


def evaluated(evaluate):
    """The small flow with an evaluation of its own."""
    base = make_task("flow")
    return Task(base.model, base.batch, base.loss, evaluate)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


# ---- exact resume


@pytest.mark.process
@pytest.mark.slow
def test_killed_at_a_random_moment_and_resumed_it_ends_bit_equal(tmp_path):
    """Twice, in processes of their own; the run without a break and the end of the other one are made here."""
    run(tmp_path / "whole")
    rng, kills = random.Random(), 0
    folder = tmp_path / "killed"
    for _ in range(2):
        before = _written(folder)
        process = program(folder)
        began = time.monotonic()
        while _written(folder) == before and time.monotonic() - began < 600:  # until this process has saved something
            time.sleep(0.02)
        time.sleep(rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if read_state(folder / "last.safetensors")[1]["step"] >= 90:
            break
    assert kills
    run(folder)
    assert contents(folder) == contents(tmp_path / "whole")


def _written(folder):
    path = folder / "last.safetensors"
    return path.stat().st_mtime_ns if path.exists() else 0


def test_one_interrupt_waits_for_the_end_of_a_step_and_saves(tmp_path):
    steps = []

    def interrupted(found, step):
        if torch.is_grad_enabled() and len(steps) == 20:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        steps.append(step)
        return found

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            train_in(tmp_path, changed(interrupted))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    saved = read_state(tmp_path / "last.safetensors")[1]["step"]
    assert saved == steps[-1] + 1
    assert saved % 7  # not one of those that are saved anyway


def test_one_run_in_a_folder_at_a_time(tmp_path):
    def tried_beside(found, step):
        if step == 3:
            with pytest.raises(InputError, match="another run, of this or another process, is training in"):
                train_in(tmp_path)
        return found

    kept = []
    try:
        train_in(tmp_path, precision="64-true")
    except InputError as error:
        kept.append(error)  # as a notebook keeps the last one, with its frames

    task = changed(tried_beside)
    train_in(tmp_path, task, steps=5)
    train_in(tmp_path, task, steps=6)


@pytest.mark.process
def test_a_forked_child_does_not_keep_others_out(tmp_path):
    with alone(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with alone(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_interrupt_in_an_evaluation_saves_nothing_half_done(tmp_path):
    def evaluate(model, done):
        if done == 50 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return {"test_loss": 1.0 / done}

    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path / "run", evaluated(evaluate), steps=50, ema=0.9)
    (tmp_path / "again").touch()
    train_in(tmp_path / "run", evaluated(evaluate), steps=50, ema=0.9)
    assert read_log(tmp_path / "run", "evaluation")["step"] == [25, 50]


def test_stopped_in_the_middle_of_a_logged_interval_it_goes_on_exactly(tmp_path):
    train_in(tmp_path / "whole", make_task(), steps=70)

    def stop(done, steps, latest):
        if done == 33:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_task(), make_settings(steps=70), tmp_path / "stopped", progress=stop)
    assert (
        read_state(tmp_path / "stopped" / "last.safetensors")[1]["step"] == 33
    )  # saved at Ctrl-C, not only every 7 steps
    train_in(tmp_path / "stopped", make_task(), steps=70)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_longer_run_continues_a_shorter_one(tmp_path):
    train_in(tmp_path / "whole", steps=80)
    for steps in (30, 80):
        task = make_task("flow")
        train_in(tmp_path / "longer", task, steps=steps)
    whole, _ = read_state(tmp_path / "whole" / "last.safetensors")
    longer, _ = read_state(tmp_path / "longer" / "last.safetensors")
    assert all(torch.equal(whole[name], longer[name]) for name in whole)


def test_guard_and_penalties_are_in_the_checkpoint(tmp_path):
    task = make_task()
    train_in(tmp_path, task, steps=20)
    again = make_task()
    train_in(tmp_path, again, steps=20)  # nothing left to do
    assert again.model.bijection.report().steps == task.model.bijection.report().steps > 0
    assert again.penalties[0].seen == task.penalties[0].seen > 0


# ---- several processes


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.soak
def test_two_processes_give_the_losses_of_one(tmp_path):
    train_in(tmp_path / "one", steps=40)
    finish(program(tmp_path / "two", 40, 2, "flow"))
    one, two = (read_log(tmp_path / name, "train") for name in ("one", "two"))
    assert one["step"] == two["step"]
    assert one["loss"] == pytest.approx(two["loss"], rel=2e-5)
    assert len(set(one["loss"])) > 1


def test_actnorms_start_from_the_rows_of_all_processes():
    x = torch.randn(64, 3) * torch.tensor([1.0, 5.0, 0.1]) + 2
    whole = ActNorm(3)
    whole(x)
    halves = x.chunk(2)

    def sums(value):  # what the other process would add, replayed in the order in which ActNorm asks
        return value + next(others)

    half = ActNorm(3)
    mean = x.double().mean(0)
    others = iter(
        [
            torch.tensor(32.0, dtype=torch.float64),
            halves[1].double().sum(0),
            (halves[1].double() - mean).square().sum(0),
        ]
    )
    with shared_statistics(sums):
        half(halves[0])
    assert torch.allclose(half.bias, whole.bias, rtol=1e-6)
    assert torch.allclose(half.log_scale, whole.log_scale, rtol=1e-5)


def test_a_batch_that_cannot_be_shared_equally():
    from bilip.training.run import own_rows

    class Three:
        world_size, global_rank = 3, 0

    with pytest.raises(InputError, match="shared equally by 3 processes"):
        own_rows(torch.zeros(50, 2), Three())
    assert own_rows(torch.arange(6.0), Three()).tolist() == [0.0, 3.0]


# ---- what a step does


def test_accumulated_parts_give_the_step_of_the_whole(tmp_path):
    models_ = []
    for accumulate in (1, 3):
        task = make_task("flow")
        train_in(tmp_path / str(accumulate), task, steps=5, accumulate=accumulate)
        models_.append(task.model)
    one, three = (torch.cat([p.flatten() for p in model.parameters()]) for model in models_)
    assert torch.allclose(one, three, atol=1e-6)


def test_the_loop_is_adam_on_the_same_batches(tmp_path):
    task = make_task("flow")
    reference = make_task("flow")
    settings = make_settings(steps=12, clip=0.5)
    train(task, settings, tmp_path, progress=silent)
    model = reference.model.train()
    with torch.no_grad():
        reference.loss(model, 0, *reference.batch(lambda purpose: seed_of(1, 0, purpose)))  # ActNorms start
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 10)
        optimizer.zero_grad()
        loss = reference.loss(model, step, *reference.batch(lambda purpose, step=step: seed_of(1, step, purpose)))
        loss["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for trained, expected in zip(task.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(trained, expected, atol=1e-6)


def test_the_average_is_what_is_evaluated(tmp_path):
    seen = []

    def evaluate(model, done):
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(torch.cat([p.flatten() for p in model.parameters()]))
        return {"test_loss": 1.0}

    task = evaluated(evaluate)
    train_in(tmp_path, task, steps=20, evaluate_every=20, ema=0.9)
    assert task.model.training
    live = torch.cat([p.flatten() for p in task.model.parameters()])
    tensors, _ = read_state(tmp_path / "last.safetensors")
    kept = torch.cat([tensors[f"average.{name}"].flatten() for name, _ in task.model.named_parameters()])
    assert torch.equal(seen[0], kept)
    assert not torch.allclose(live, kept)


def test_average_by_hand():
    model = torch.nn.Linear(1, 1, bias=False)
    start = float(model.weight.detach())
    average, expected = Average(model, 0.8), start
    for k in range(5):
        model.weight.data.fill_(k)
        average.update()
        expected = 0.8 * expected + 0.2 * k
    with average.in_place():
        assert float(model.weight.detach()) == pytest.approx(expected, rel=1e-6)
    assert float(model.weight.detach()) == 4.0


def test_the_best_weights_are_kept(tmp_path):
    losses = iter([3.0, 1.0, 2.0])
    weights = []

    def evaluate(model, done):
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"test_loss": next(losses)}

    trained = train_in(tmp_path, evaluated(evaluate), steps=30, evaluate_every=10)
    assert (trained.best_step, trained.best_loss) == (20, 1.0)
    best = make_task("flow").model
    load_weights(best, read_state(tmp_path / "best.safetensors")[0])
    assert all(torch.equal(value, weights[1][name]) for name, value in best.state_dict().items())


def test_schedule():
    settings = Settings(steps=100, lr=1.0, warmup=4, milestones=(10, 20), decay=0.5)
    assert [settings.rate(step) for step in (0, 3, 9, 10, 19, 20)] == [0.25, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_logs_hold_means_over_their_interval(tmp_path):
    losses = []

    def noted(found, step):
        if torch.is_grad_enabled():
            losses.append(float(found["loss"].detach()))
        return found

    train_in(tmp_path, changed(noted), steps=25)
    log = read_log(tmp_path, "train")
    assert log["step"] == [10, 20, 25]
    losses = losses[1:]  # the first call starts the ActNorms
    expected = [sum(part) / len(part) for part in (losses[:10], losses[10:20], losses[20:])]
    assert log["loss"] == pytest.approx(expected, rel=1e-5)
    with (tmp_path / "train.csv").open() as file:
        assert next(csv.reader(file)) == ["step", "loss", "nll", "lr"]


def test_seeds_depend_on_all_they_are_for():
    seeds = {seed_of(a, b, c) for a in (0, 1) for b in (0, 1) for c in ("data", "nets")}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- bad input


def test_diverged_training_says_where_and_what_is_left(tmp_path):
    task = changed(lambda found, step: {"loss": found["loss"] * (math.nan if step == 17 else 1.0)})
    with pytest.raises(TrainingDiverged, match=r"in step 18; the last good checkpoint is .*last.safetensors") as info:
        train_in(tmp_path, task, steps=40)
    assert info.value.step == 18
    tensors, facts = read_state(tmp_path / "last.safetensors")
    assert facts["step"] == 14
    assert all(bool(value.isfinite().all()) for value in tensors.values())


def test_a_guarded_walk_with_a_penalty_on_an_overflowing_model_diverges_by_name(tmp_path):
    torch.manual_seed(58)
    trunk = models.real_nvp(2, blocks=4, hidden=(8,), scale="exp")
    with torch.no_grad():  # log p is finite, the inverse is 1e10 and its derivative overflows
        trunk[1].t.layers[-1].bias[1:] -= 27.1
        trunk[0].t.layers[-1].bias[1:] -= 23.0
    x, penalties = torch.randn(8, 2), (FiniteDifference(0.1),)
    task = Task(Flow(Reversible(trunk)), lambda draw: (x,), Likelihood(penalties), penalties=penalties)
    with warnings.catch_warnings(), pytest.raises(TrainingDiverged, match="the loss was"):
        warnings.simplefilter("ignore")
        train_in(tmp_path, task, steps=5)


def test_weights_that_are_not_finite_at_the_end(tmp_path):
    task = changed(lambda found, step: {"loss": found["loss"] if step < 9 else _broken(found["loss"])})
    with pytest.raises(TrainingDiverged, match="weights that are not finite; the last good checkpoint"):
        train_in(tmp_path, task, steps=10)
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 7


def _broken(value):
    """The same number with a gradient of NaN."""
    value.register_hook(lambda grad: grad * math.nan)
    return value


def test_other_parameters_are_trained_than_before(tmp_path):
    train_in(tmp_path, steps=5)
    task = make_task("flow")
    next(iter(task.model.parameters())).requires_grad_(False)
    with pytest.raises(CheckpointError, match="the parameters that are trained differ"):
        train_in(tmp_path, task, steps=9)


def test_files_of_the_user_stay(tmp_path):
    (tmp_path / "train.csv").write_text("id,label\n1,cat\n")
    (tmp_path / "mine.csv").write_text("step,of mine\n")
    with pytest.raises(InputError, match="not a log of this loop"):
        train_in(tmp_path, steps=5)
    assert (tmp_path / "train.csv").read_text() == "id,label\n1,cat\n"
    (tmp_path / "train.csv").unlink()
    train_in(tmp_path, steps=5)
    assert (tmp_path / "mine.csv").exists()


def test_logs_shorter_than_their_checkpoint(tmp_path):
    train_in(tmp_path, steps=20)
    (tmp_path / "train.csv").write_text("step,loss\n")
    with pytest.raises(CheckpointError, match="shorter than its checkpoint"):
        train_in(tmp_path, steps=30)


def test_the_weights_alone_are_no_state(tmp_path):
    train_in(tmp_path, steps=25)
    (tmp_path / "best.safetensors").replace(tmp_path / "last.safetensors")
    with pytest.raises(CheckpointError, match="not the state of a run"):
        train_in(tmp_path, steps=25)


def test_tensorboard_has_the_rows_of_the_csv(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (20, 40):
        train_in(tmp_path, steps=steps)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert sorted(steps) == [10, 20, 30, 40]  # two files of one second are read in any order


def test_batch_norm_is_not_shown_the_first_batch_twice(tmp_path):
    base = make_task("flow")

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.flow, self.norm = base.model, torch.nn.BatchNorm1d(2)

    model = Both()
    task = Task(model, base.batch, lambda m, step, x: base.loss(m.flow, step, m.norm(x)))
    train_in(tmp_path, task, steps=3)
    assert int(model.norm.num_batches_tracked) == 3


@pytest.mark.parametrize(
    ("step", "when"), [(0, "at the start"), (3, r"in step 4; the last good checkpoint is .*last\.safetensors")]
)
@pytest.mark.parametrize("kind", ["flow", "all"])
def test_out_of_memory_says_what_to_do(tmp_path, kind, step, when):
    task = make_task(kind)
    calls = []

    def loss(model, number, *batch):
        calls.append(number)
        if number == step and (step or len(calls) == 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity")
        return task.loss(model, number, *batch)

    other = Task(task.model, task.batch, loss, penalties=task.penalties)
    with pytest.raises(torch.OutOfMemoryError, match=rf"out of memory {when} \(CUDA out of memory\)") as caught:
        train_in(tmp_path, other, steps=5, save_every=1)
    said = str(caught.value)
    assert "a smaller batch" in said
    assert "\n" not in said
    assert ("bilip.Reversible" in said) == (kind == "flow")  # the other one is wrapped already


def test_a_run_of_another_architecture_or_with_other_settings(tmp_path):
    train_in(tmp_path, steps=5)
    other = Task(Flow(models.real_nvp(2, blocks=6)), make_task("flow").batch, Likelihood())
    with pytest.raises(CheckpointError, match="another architecture"):
        train_in(tmp_path, other, steps=5)
    with pytest.raises(CheckpointError, match=r"other settings \(lr=0.005 there, lr=0.1 now\)"):
        train_in(tmp_path, steps=5, lr=0.1)
    with pytest.raises(CheckpointError, match="5 steps, more than the 3 asked for"):
        train_in(tmp_path, steps=3)
    with pytest.raises(CheckpointError, match=r"penalties \[\] there, \['FiniteDifference'\] now"):
        train_in(
            tmp_path,
            Task(make_task("flow").model, make_task("flow").batch, Likelihood(), None, make_task().penalties),
            steps=5,
        )


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": 1}      '])
def test_a_broken_state(tmp_path, content):
    path = tmp_path / "last.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        train_in(tmp_path, steps=5)


def test_a_truncated_or_foreign_state(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state(path, {"a": torch.ones(100)}, {"step": 1})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="not a readable training state"):
        read_state(path)
    import safetensors.torch

    path.write_bytes(safetensors.torch.save({"a": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="not written by a bilip training run"):
        read_state(path)
    save_state(path, {"a": torch.ones(1)}, {"version": 99})
    with pytest.raises(CheckpointError, match="version 99"):
        read_state(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"lr": -1.0},
        {"warmup": -1},
        {"clip": 0.0},
        {"ema": 1.0},
        {"accumulate": 0},
        {"device": "tpu"},
        {"devices": 0},
        {"log_every": 0},
        {"betas": (1.5, 0.9)},
        {"betas": (0.9,)},
        {"weight_decay": -1.0},
        {"milestones": 5},
        {"lr": "0.1"},
        {"steps": True},
        {"seed": 1.5},
        {"precision": "8-bit"},
    ],
)
def test_bad_settings(changes):
    with pytest.raises(InputError, match=f"Settings\\({next(iter(changes))}="):
        make_settings(**changes)


def test_bad_tasks(tmp_path):
    base, frozen, learned = make_task("flow"), make_task("flow"), torch.nn.Linear(1, 1)
    frozen.model.requires_grad_(False)
    learned.forward = lambda m, s, x: base.loss(m, s, x)

    def task(loss=base.loss, batch=base.batch, evaluate=None):
        return Task(base.model, batch, loss, evaluate)

    for k, (given, said) in enumerate(
        (
            (task(lambda m, s, x: {"nll": x.sum()}), "scalar tensor under the name 'loss'"),
            (task(lambda m, s, x: x.sum()), "returned a Tensor"),
            (task(lambda m, s, x: {"loss": x.sum()}), "does not depend on any parameter"),
            (task(lambda m, s, x: {**base.loss(m, s, x), "lr": x.sum()}), "a column of that name"),
            (task(lambda m, s, x: {**base.loss(m, s, x), "mean": x}), "scalar tensor under the name 'mean'"),
            (task(batch=lambda draw: torch.zeros(4, 2)), "expected a tuple of tensors"),
            (task(batch=lambda draw: (torch.zeros(0, 2),)), "1 or more"),
            (task(batch=lambda draw: (torch.zeros(4, 2), torch.zeros(3))), "same number of rows"),
            (task(learned), "parameters of its own"),
            (task(evaluate=lambda m, d: 3.5), "expected numbers by name"),
            (frozen, "nothing to train"),
        )
    ):
        with pytest.raises(InputError, match=said):
            train_in(tmp_path / str(k), given, steps=1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot train in"):
        train_in(tmp_path / "file")
    for changes, said in (
        ({"precision": "64-true"}, "float64"),
        ({"precision": "16-mixed"}, "float16 needs a GPU"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"capture": True}, "only one GPU"),
    ):
        if "precision" in changes or not torch.cuda.is_available():
            with pytest.raises(InputError, match=said):
                train_in(tmp_path / "changed", **changes)
