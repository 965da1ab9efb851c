"""The callback does to a Lightning training what adding penalties to its loss does, and measures beside it."""

import math
import os
import runpy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

import bilip.training.callback as callback_module  # noqa: E402
from bilip.blocks import DiagonalScaling, Flow  # noqa: E402
from bilip.errors import InputError  # noqa: E402
from bilip.models import real_nvp  # noqa: E402
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty  # noqa: E402
from bilip.reversible import DriftWarning, Reversible  # noqa: E402
from bilip.training.callback import StabilityCallback  # noqa: E402
from bilip.training.monitor import StabilityMonitor  # noqa: E402
from catalogue import squash  # noqa: E402

# Lightning's remarks on workers, checkpoint folders and pytrees are not about us.
pytestmark = pytest.mark.filterwarnings("ignore:(?!the guard)")


class Module(pl.LightningModule):
    """A flow whose task sees one latent only; `penalties` are added to the loss, as a user would do without the callback."""

    def __init__(self, flow=None, penalties=(), factor=lambda index: 1.0, optimizer=None, context=False):
        super().__init__()
        torch.manual_seed(0)
        self.flow = real_nvp(4, blocks=2, hidden=(8,)) if flow is None else flow
        self.added, self.factor, self.context = penalties, factor, context
        self.make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        self.grads = []

    def training_step(self, batch, index):
        x, target = batch
        given = target[:, None] if self.context else None
        loss = (self.flow(x, given)[:, 0] - target).square().mean()
        for penalty in self.added:
            loss = loss + self.factor(index) * penalty(self.flow, x, step=self.trainer.global_step, context=given)
        return loss

    def on_before_optimizer_step(self, optimizer):  # after that of the callbacks
        self.grads.append({name: p.grad if p.grad is None else p.grad.clone() for name, p in self.named_parameters()})

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Remembers(Logger):
    name, version = "remembers", 0

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, dict(metrics)))


def data(batches=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16 * batches, 4, generator=generator, dtype=dtype)
    return DataLoader(TensorDataset(x, x.square().sum(1).sqrt()), batch_size=16)


def fit(module, *callbacks, steps=6, loader=None, ckpt_path=None, **options):
    options = {"logger": False, "accelerator": "cpu", **options}
    for name in ("checkpointing", "progress_bar", "model_summary"):
        options[f"enable_{name}"] = False
    trainer = pl.Trainer(max_steps=steps, callbacks=list(callbacks), **options)
    trainer.fit(module, loader or data(), ckpt_path=ckpt_path)
    return trainer


def flow_of(module):
    return module.flow


def apart(one, two):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def penalties():
    return [FlowLikelihood(0.1), FiniteDifference(0.3, every=2), FiniteDifference(0.1, mode="inverse")]


# ---- penalties


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}, {"precision": "64-true"}], ids=str)
@pytest.mark.parametrize("memory_saving", [False, True])
def test_the_same_as_adding_penalties_to_the_loss(options, memory_saving):
    def make(*args):
        module = Module(*args)
        if memory_saving:
            module.flow = Reversible(module.flow)
        return module

    module, plain, added = make(), make(), make(None, penalties())
    callback = StabilityCallback(flow_of, penalties(), every=None)
    trainer = fit(module, callback, **options)
    fit(plain, **options)
    fit(added, **options)
    assert apart(module, added) < 1e-6
    assert apart(module, plain) > 1e-3
    norm = torch.stack([grad.norm() for grad in module.grads[0].values() if grad is not None]).norm()
    assert norm > options.get("gradient_clip_val", 0)  # so that there is something to clip
    assert [(p.seen, p.skipped) for p in callback.penalties.values()] == [(p.seen, p.skipped) for p in added.added]
    names = {"penalty/FlowLikelihood", "penalty/FiniteDifference", "penalty/FiniteDifference_2"}
    assert {name for name in trainer.callback_metrics if name.startswith("penalty/")} == names
    assert all(trainer.callback_metrics[name] != 0 for name in names)  # also of one that was not due in the last step


def test_accumulated_gradients_get_the_penalty_of_the_last_batch():
    module, added = Module(), Module(None, [FlowLikelihood(0.1)], lambda index: 2.0 * (index % 2))  # the loss is halved
    callback = StabilityCallback(flow_of, [FlowLikelihood(0.1)], every=3, spectrum=False)
    fit(module, callback, steps=4, accumulate_grad_batches=2)
    fit(added, steps=4, accumulate_grad_batches=2)
    assert apart(module, added) < 1e-6
    assert [row.step for row in callback.rows] == [0, 3]


def test_context():
    def flow():
        torch.manual_seed(3)
        return real_nvp(4, blocks=2, hidden=(8,), context=1)

    module, added = Module(flow(), context=True), Module(flow(), penalties(), context=True)
    both = StabilityCallback(flow_of, penalties(), every=5, x=lambda batch: (batch[0], batch[1][:, None]))
    fit(module, both)
    fit(added)
    assert apart(module, added) < 1e-6
    assert [row.step for row in both.rows] == [0, 5]
    assert max(row.relative_max for row in both.rows) < 1e-5


def test_which_parameters_get_a_gradient():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = real_nvp(4, blocks=1, hidden=(8,)), nn.Linear(2, 2)
            self.trunk = DiagonalScaling(torch.full((4,), 2.0))  # the penalty's alone

        def forward(self, x, context):
            return self.used(x)

    part = Part()
    next(part.used.parameters()).requires_grad_(False)
    module = Module(part)
    fit(module, StabilityCallback(flow_of, [FlowLikelihood(0.1)], every=None), steps=1)
    plain = Module(part)
    plain.load_state_dict(module.state_dict())
    fit(plain, steps=1)
    got, alone = ({name for name, grad in m.grads[0].items() if grad is not None} for m in (module, plain))
    assert got - alone == {name for name in module.grads[0] if "trunk" in name} != set()
    assert not {name for name in got if "idle" in name}
    assert len([name for name in got if "used" in name]) == len(list(part.used.parameters())) - 1


def test_a_skipped_batch_stays_skipped():
    class Skips(Module):
        def training_step(self, batch, index):
            return None

    module, callback = Skips(), StabilityCallback(flow_of, penalties(), every=None)
    fit(module, callback, steps=2)
    assert apart(module, Skips()) == 0
    assert callback.penalties["FlowLikelihood"].seen == 0


def test_full_precision_beside_mixed_precision():
    module, x = Module(), next(iter(data()))[0]
    exact = float(FiniteDifference(1.0, eps=1e-2)(module.flow, x, step=0))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = float(FiniteDifference(1.0, eps=1e-2)(module.flow, x, step=0))
    callback = StabilityCallback(flow_of, [FiniteDifference(1.0, eps=1e-2)], every=None)
    trainer = fit(module, callback, steps=1, precision="bf16-mixed")
    found = float(trainer.callback_metrics["penalty/FiniteDifference"])
    assert found == pytest.approx(exact, rel=1e-6)
    assert abs(rounded - exact) > 1e-3 * exact


def test_a_fused_optimizer_takes_scaled_gradients():
    def run(fused, weight):
        module = Module(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, fused=fused))
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
        fit(module, StabilityCallback(flow_of, [FlowLikelihood(weight)], every=None), steps=3, plugins=plugin)
        return module

    assert apart(run(True, 0.1), run(False, 0.1)) < 1e-6
    assert apart(run(True, 0.1), run(True, 0.0)) > 1e-3


def test_a_penalty_without_any_finite_sample_changes_nothing():
    class Nothing(Penalty):
        def value(self, model, x, latent, step, context):
            return x.new_zeros(())

    module, plain = Module(), Module()
    fit(module, StabilityCallback(flow_of, [Nothing(1.0)], every=None))
    fit(plain)
    assert apart(module, plain) == 0


# ---- monitor and guard


def test_rows_and_where_they_go():
    module, logger = Module(), Remembers()
    callback = StabilityCallback(lambda module: Flow(module.flow), every=3, samples=8)
    trainer = fit(module, callback, steps=7, logger=logger, log_every_n_steps=50)
    assert [row.step for row in callback.rows] == [0, 3, 6]
    last = StabilityMonitor(module.flow, next(iter(data()))[0], samples=8).measure(6)  # after the last step
    for name in ("relative_median", "relative_max", "sigma_min", "sigma_max", "condition"):
        assert getattr(callback.rows[-1], name) == pytest.approx(getattr(last, name), rel=1e-9)
        assert getattr(callback.rows[0], name) != getattr(last, name)
        assert float(trainer.callback_metrics[f"stability/{name}"]) == pytest.approx(getattr(last, name), rel=1e-6)
    logged = [(step, values["stability/condition"]) for step, values in logger.seen if "stability/condition" in values]
    assert logged == [(row.step, row.condition) for row in callback.rows]
    assert "guard/drift" not in trainer.callback_metrics
    plain = Module()
    fit(plain, steps=7)
    assert apart(module, plain) == 0  # measuring leaves training alone


def test_data_of_your_own_and_what_is_not_measured_is_not_logged():
    x = 3 * torch.randn(10, 4)
    module, logger = Module(), Remembers()
    callback = StabilityCallback(flow_of, every=1, data=x, spectrum=False)
    fit(module, callback, steps=1, logger=logger)
    row = StabilityMonitor(module.flow, x, spectrum=False).measure(0)
    assert callback.rows[0].relative_median == row.relative_median
    assert math.isnan(callback.rows[0].condition)
    names = {name for _, values in logger.seen for name in values}
    assert "stability/relative_max" in names
    assert "stability/condition" not in names


def test_samples_are_found_in_any_batch():
    class Nested(Module):
        def training_step(self, batch, index):
            batch["samples"][1].add_(0.0)
            return super().training_step((batch["samples"][1], batch["samples"][1][:, 0]), index)

    def collate(rows):
        x = torch.stack(rows)
        return {"label": torch.zeros(len(x), dtype=torch.long), "samples": ["name", x]}

    callback = StabilityCallback(flow_of, [FlowLikelihood(0.1)], every=1, spectrum=False)
    fit(Nested(), callback, steps=1, loader=DataLoader(torch.randn(16, 4), batch_size=8, collate_fn=collate))
    assert (callback.penalties["FlowLikelihood"].seen, len(callback.rows)) == (8, 1)


def squashed():
    torch.manual_seed(0)
    flow = real_nvp(4, blocks=3, hidden=(8,))
    squash(flow[1], 1e-6)
    return flow


def test_the_guard_is_logged_and_warns_once():
    module = Module(Flow(Reversible(squashed())))
    module.flow.forward = lambda x, context=None: module.flow.bijection(x)
    callback = StabilityCallback(flow_of, every=2, spectrum=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, callback, steps=4)
    report = module.flow.bijection.report()
    assert report.repaired > 0
    assert float(trainer.callback_metrics["guard/repaired"]) == report.repaired
    assert float(trainer.callback_metrics["guard/drift"]) == pytest.approx(max(report.drift.values()), rel=1e-6)
    assert len([w for w in caught if issubclass(w.category, DriftWarning)]) == 1
    calm = Module(Reversible(real_nvp(4, blocks=2, hidden=(8,))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(calm, StabilityCallback(flow_of, every=None), steps=1)
    assert float(trainer.callback_metrics["guard/repaired"]) == calm.flow.report().repaired == 0
    assert not [w for w in caught if issubclass(w.category, DriftWarning)]


# ---- checkpoints


def test_resume_goes_on_with_rows_counts_and_guards(tmp_path):
    def make():
        torch.manual_seed(0)
        module = Module(Reversible(squashed()))
        return module, StabilityCallback(flow_of, penalties(), every=2, spectrum=False)

    module, callback = make()
    fit(module, callback, steps=5).save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = make()
    fit(resumed, again, steps=8, ckpt_path=tmp_path / "half.ckpt")
    whole, straight = make()
    fit(whole, straight, steps=8)
    assert str(again.rows[:3]) == str(callback.rows)  # NaN for NaN
    assert [row.step for row in again.rows] == [row.step for row in straight.rows] == [0, 2, 4, 6]
    assert again.monitor is not None
    assert again.monitor.rows is again.rows
    assert again.state_dict()["penalties"] == straight.state_dict()["penalties"]
    assert again.penalties["FlowLikelihood"].seen == 8 * 16
    assert resumed.flow.report().steps == whole.flow.report().steps
    assert resumed.flow.report().anchors == whole.flow.report().anchors != {}


# ---- several processes

SCRIPT = """
import os, sys, torch, lightning.pytorch as pl
from bilip.models import real_nvp
from bilip.regularizers import FlowLikelihood, Penalty
import bilip.training.callback as callback_module
from bilip.training.monitor import StabilityMonitor
from bilip.training.callback import StabilityCallback

devices, folder = int(sys.argv[1]), sys.argv[2]
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.manual_seed(0)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.flow = real_nvp(4, blocks=2, hidden=(8,))
    def training_step(self, batch, index):
        return self.flow(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

class OnlyFirst(Penalty):  # as if every sample of process 1 were left out: a constant there
    def value(self, model, x, latent, step, context):
        return x.new_zeros(()) if rank else model(x[:8]).square().mean() / (3 - devices)

class Counts(StabilityMonitor):
    measured = 0
    def measure(self, step):
        Counts.measured += 1
        return super().measure(step)

callback_module.StabilityMonitor = Counts
module, x = Module(), torch.randn(4, 16, 4)
penalties = [FlowLikelihood(0.1), OnlyFirst(0.2, every=3)]
callback = StabilityCallback(lambda m: m.flow, penalties, every=2, data=torch.randn(8, 4))
trainer = pl.Trainer(
    max_steps=4, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", callbacks=[callback],
    use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
share = x.chunk(devices, 1)[rank]
trainer.fit(module, torch.utils.data.DataLoader(share.flatten(0, 1), batch_size=16 // devices))
found = {name: float(value) for name, value in trainer.callback_metrics.items()}
state = {"weights": module.state_dict(), "rows": callback.state_dict()["rows"], "metrics": found,
         "measured": Counts.measured}
torch.save(state, f"{folder}/{devices}_{rank}.pt")
"""


@pytest.mark.soak
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.process
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command, limit = [sys.executable, str(script), "2", str(tmp_path)], dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=limit, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(callback_module, "StabilityMonitor", StabilityMonitor)  # the script puts its own there
    monkeypatch.setattr(sys, "argv", [str(script), "1", str(tmp_path)])
    runpy.run_path(str(script))
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1"))
    for name, value in one["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        assert float((first["weights"][name] - value).abs().max()) < 1e-6
    assert [row["step"] for row in first["rows"]] == [row["step"] for row in one["rows"]] == [0, 2]
    assert str(first["rows"]) == str(second["rows"])
    assert (first["measured"], second["measured"]) == (2, 0)
    assert first["metrics"] == second["metrics"]  # so that early stopping decides alike
    for name in ("penalty/FlowLikelihood", "penalty/OnlyFirst", "stability/condition"):
        assert first["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5)


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((real_nvp(4),), {}, r"model=Chain\): expected a function"),
        (("flow",), {}, r"model=str\): expected a function"),
        ((flow_of, FlowLikelihood(1.0)), {}, "expected a list of penalties"),
        ((flow_of, [torch.zeros(1)]), {}, "expected a list of penalties"),
        ((flow_of,), {"x": 3}, r"x=int\): expected a function"),
        ((flow_of,), {"every": 0}, "every=0"),
        ((flow_of,), {"every": 2.5}, "every=2.5"),
        ((flow_of,), {"samples": 0}, "samples=0"),
        ((flow_of,), {"penalty": 0}, "unexpected keyword argument 'penalty'"),
        ((flow_of,), {"data": torch.full((2, 4), math.nan)}, "NaN"),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(InputError, match=message):
        StabilityCallback(*arguments, **options)


def test_what_cannot_be_trained_with_it():
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(InputError, match=r"Module optimizes manually\. Add penalty\(model, x, step=\.\.\.\)"):
        fit(manual, StabilityCallback(flow_of))
    with pytest.raises(InputError, match=r"StabilityCallback\(model=\.\.\.\)"):
        fit(Module(), StabilityCallback(lambda module: nn.Linear(4, 4)))
    integers = DataLoader(torch.ones(8, 4, dtype=torch.long), batch_size=4)
    with pytest.raises(InputError, match="no tensor of floats in a batch"):
        fit(Module(), StabilityCallback(flow_of), loader=integers)
    with pytest.raises(InputError, match=r"x\(batch\) gave str"):
        fit(Module(), StabilityCallback(flow_of, x=lambda batch: "x"))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = type("Sharded", (FSDPStrategy,), {})
    with pytest.raises(InputError, match="shards parameters"):
        StabilityCallback(flow_of).on_fit_start(trainer, Module())
