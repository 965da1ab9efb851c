"""A cure tries from the cheapest, audits each way, and hands over only what holds; the command writes it to a folder."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bilip
from bilip import models
from bilip.auditing.budget import BUDGETS
from bilip.cures import RUNGS, reranging
from bilip.cures.rung import Rung
from bilip.cures.treated import copied, wrapped
from bilip.cures.tuning import Tuning, first_of
from bilip.errors import BilipError, CheckpointError, InputError
from bilip.record.files import UNSEALED, seal
from catalogue import Map
from in_process import command_line
from stacks import FLOWS, bilip_flow, freia_flow, nflows_flow, zuko_maf

BUDGET = replace(BUDGETS["quick"], samples=256, noise=256, draws=256, batch=128, bad_share=0.04, log_dets=1)


def cure(model, data, **options):
    return bilip.cure(model, data, **({"budget": BUDGET} | options))


def inverted(model, **options):
    """A cure of the inversion on a few points."""
    return cure(model, points(), uses=["inversion"], **options)


def re_ranged(model, **options):
    """The same by bounded scales, tuned for a few steps, at any cost."""
    few = {"train": points(2000, 7), "steps": 30, "most_cost": 1e9, "rungs": ["re-range"]}
    return inverted(model, **(few | options))


def points(count: int = 256, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in bilip.as_bijection(model).state_dict().items()}


def made(name: str, log_scale: float = -4.0):
    pytest.importorskip(name)
    torch.manual_seed(0)
    return FLOWS[name](log_scale)


@pytest.mark.parametrize("name", list(FLOWS))
def test_more_bits_cure_a_flow_of_every_library_without_touching_it(name, tmp_path):
    result = check_cure(name, tmp_path, torch.float64, inverted, rungs=["settings", "arithmetic"], all_rungs=True)
    assert result.before.verdicts["inversion"].status == "unsafe"
    assert result.after is not None
    assert result.after.verdicts["inversion"].status == "safe"
    whole = result.tried[-1]
    assert whole.what == "the whole model in float64"
    assert whole.outcome == "cured"
    owner = result.model if isinstance(result.model, nn.Module) else bilip.as_bijection(result.model)
    assert not any(part.training for part in owner.modules())
    assert json.loads((tmp_path / "cure.json").read_text())["status"] == "cured"
    if name not in ("bilip", "FrEIA"):  # it still samples and scores by the library's own methods
        assert result.model.sample(5).shape == (5, 4)
        assert torch.isfinite(result.model.log_prob(points(5))).all()


@pytest.mark.parametrize("name", list(FLOWS))
def test_bounded_scales_cure_a_flow_of_every_library(name, tmp_path):
    def fit(model, batch):  # any loss: here the latents are drawn to the data
        return (bilip.as_bijection(model)(batch) - batch).square().mean()

    check_cure(name, tmp_path, torch.float32, re_ranged, loss=fit)


def check_cure(name, folder, dtype, way, **options):
    """The model stays, another is handed over and holds on other samples, and comes back from its folder into other weights."""
    model = made(name)
    before = state(model)
    result = way(model, **options)
    assert all(torch.equal(value, before[key]) for key, value in state(model).items() if key in before)
    assert result.status == "cured", str(result)
    x, cured = points(seed=6), bilip.as_bijection(result.model)
    with torch.no_grad():
        z = cured(x)
        error = (cured.inverse(z).double() - x.double()).norm(dim=1) / x.double().norm(dim=1)
    assert z.dtype == dtype
    assert float((error > 3.5e-4).double().mean()) < 0.04
    result.save(folder)
    again = bilip.as_bijection(bilip.cures.restore(made(name, -0.1), folder))
    with torch.no_grad():
        assert torch.equal(again(x), z)
    return result


def test_a_conditional_base_takes_its_context_after_a_cure_in_float64():
    pytest.importorskip("nflows")
    torch.manual_seed(0)
    model = nflows_flow(-4.4, context=3)
    context = torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
    result = cure(model, (points(), context), uses=["inversion"], rungs=["arithmetic"], all_rungs=True)
    assert [a.outcome for a in result.tried if a.settings.get("float64_state") or a.settings.get("float64")] == [
        "cured",
        "cured",
    ], str(result)
    x = points(20, 7)
    for attempt in result.tried:
        assert attempt.treated is not None
        log_p = attempt.treated.model.log_prob(x, context[:20])
        assert torch.allclose(log_p.float(), model.log_prob(x, context[:20]), rtol=1e-4)
        assert attempt.treated.model.sample(20, context[:20]).shape == (20, 4)


def test_what_is_safe_is_handed_back_as_a_copy_and_a_folder_holds_one_cure(tmp_path):
    fine, x = bilip_flow(-0.1), points(20, 7)
    result = cure(fine, points())
    assert result.status == "not needed"
    assert result.tried == ()
    assert result.model is not fine
    result.save(tmp_path)
    torch.manual_seed(9)
    again = bilip.cures.restore(bilip_flow(-0.3), tmp_path)  # with the weights that were found safe
    assert torch.equal(again.bijection(x), fine.bijection(x))
    inverted(bilip_flow(-12.0), rungs=["settings"]).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before.json", "cure.json"]
    with pytest.raises(CheckpointError, match="holds no model: nothing that was tried"):
        bilip.cures.restore(bilip_flow(), tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 2}, "version 2; this bilip reads version 1"),
        ({"steps": 3}, "says was done cannot be done to Flow"),
        ({"steps": [3]}, "says was done cannot be done to Flow"),
        ({"steps": [{"rung": "fly", "settings": {}}]}, "says was done cannot be done to Flow .KeyError: 'fly'"),
        ({"steps": [{"rung": "re-range", "settings": {}}]}, "says was done cannot be done to Flow .KeyError: 'widths'"),
    ],
)
def test_a_damaged_list_of_steps_is_one_line(tmp_path, changed, said):
    document = {"format": "bilip-cure", "version": 1, "status": "cured", "steps": [], "sha256": UNSEALED}
    (tmp_path / "cure.json").write_bytes(seal(json.dumps(document | changed).encode()))
    with pytest.raises(CheckpointError, match=said):
        bilip.cures.restore(bilip_flow(), tmp_path)


@pytest.mark.parametrize("name", ["cure.json", "model.safetensors"])
def test_a_flipped_bit_in_a_saved_cure_is_found(tmp_path, name):
    cure(bilip_flow(-0.1), points()).save(tmp_path)
    data = (tmp_path / name).read_bytes()
    for place in range(0, len(data), len(data) // 20):
        flipped = bytearray(data)
        flipped[place] ^= 1
        (tmp_path / name).write_bytes(flipped)
        with pytest.raises(BilipError, match=re.escape(str(tmp_path))):
            bilip.cures.restore(bilip_flow(-0.3), tmp_path)
    (tmp_path / name).write_bytes(data)
    bilip.cures.restore(bilip_flow(-0.3), tmp_path)


def test_what_needs_a_loss_is_skipped_and_named_without_one():
    seen = []
    result = inverted(bilip_flow(-12.0), each=seen.append)
    assert tuple(seen) == result.tried
    assert result.status == "not cured"
    assert result.model is None
    assert {a.rung: a.reason for a in result.tried if a.outcome == "skipped"}["re-range"].startswith(
        "it needs batches and a loss"
    )


@pytest.fixture
def own_rungs():
    """Rungs that a test defines are gone after it."""
    before = dict(RUNGS)
    yield
    RUNGS.clear()
    RUNGS.update(before)


@pytest.mark.usefixtures("own_rungs")
def test_nothing_unsafe_is_handed_over_and_time_over_gives_the_best_so_far():
    model = bilip_flow(-12.0)
    result = cure(model, points(), uses=["inversion", "sampling"], rungs=["arithmetic"])
    assert result.status == "not cured"
    assert result.model is None

    class Slow(Rung):
        name = "slow"
        place = 5

        def options(self, case):
            yield {}, "nothing"

        def finish(self, treated, settings, case):
            while case.left() > 0:
                time.sleep(0.01)
            return {}

    late = cure(model, points(), uses=["inversion", "sampling"], rungs=["slow", "arithmetic"], time=2.0)
    assert late.status in ("best so far", "not cured")
    assert late.status == "best so far" or late.model is None


@pytest.mark.usefixtures("own_rungs")
def test_a_cure_that_ruins_a_safe_use_is_not_handed_over():
    class Ruins(Rung):
        name = "ruins"
        place = 1

        def options(self, case):
            yield {}, "a latent that forgets its scale"

        def apply(self, treated, settings):
            return wrapped(treated, Map(log_det=lambda x: x.new_full((len(x),), 7.0)))

    result = inverted(made("bilip"), rungs=["ruins"])
    assert result.status == "not cured"
    assert result.tried[0].outcome == "not safe"


def test_autocast_is_switched_off_where_it_alone_breaks_the_model():
    class Mixing(nn.Module):
        """A matrix and its inverse: products that autocast rounds to 8 bits."""

        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])

        def forward(self, x):
            return nn.functional.linear(x, self.matrix)

        def inverse(self, z):
            return nn.functional.linear(z, self.matrix.T)

    torch.manual_seed(0)
    model, x = Mixing(), points(seed=6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = inverted(model)
        with torch.no_grad():
            error = (result.model.inverse(result.model(x)) - x).norm(dim=1)
    assert result.status == "cured", str(result)
    assert result.chosen is not None
    assert (result.chosen.rung, result.done) == ("settings", "autocast off")
    assert float(error.max()) < 1e-4


def test_a_solver_that_stops_early_goes_on():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))
            self.fixed_point_iterations = 4

        def forward(self, x):
            return x + 0.5 * torch.sin(x) + self.shift

        def inverse(self, z):
            x = z
            for _ in range(self.fixed_point_iterations):
                x = z - self.shift - 0.5 * torch.sin(x)
            return x

    model = Residual()
    result = inverted(model, rungs=["settings"])
    assert result.status == "cured", str(result)
    assert (result.model.fixed_point_iterations, model.fixed_point_iterations) == (40, 4)


def test_uses_that_were_not_asked_for_can_be_left_out():
    result = inverted(made("bilip"), rungs=["arithmetic"], others=False)
    assert result.cured
    assert result.after is not None
    assert result.after.verdicts["likelihood"].status == "not-measured"


def test_rungs_are_tried_in_the_order_that_is_given():
    result = cure(made("bilip"), points(), uses="inversion", rungs="arithmetic, settings", all_rungs=True)
    assert [a.rung for a in result.tried][-1] == "settings"
    assert result.cured


def test_each_audit_draws_its_noise_chunk_by_chunk(monkeypatch):
    from bilip.data.rows import ChunkRows

    made_chunks = []
    chunk = ChunkRows._chunk

    def counted(self, index):
        if self._last is None or self._last[0] != index:
            made_chunks.append(index)
        return chunk(self, index)

    monkeypatch.setattr(ChunkRows, "_chunk", counted)
    budget = replace(BUDGET, samples=1024, noise=1024)
    cure(bilip_flow(-0.1), points(1024), ood=["uniform"], budget=budget)
    assert len(made_chunks) <= 40  # four chunks a pass; row by row it would be hundreds


def test_time_that_ends_before_the_first_audit_proves_nothing():
    result = cure(bilip_flow(-12.0), points(), time=1e-6)
    assert result.status == "not cured"
    assert result.uses
    assert [a.rung for a in result.tried if a.reason == "the time of 1e-06 s was over"] == [
        "settings",
        "arithmetic",
        "replacements",
    ]


def test_a_held_out_loss_that_is_not_finite_is_never_handed_over():
    result = inverted(
        made("bilip"),
        train=points(300, 7),
        loss=lambda model, batch: model.log_prob(batch).mean() * torch.nan,
        rungs=["arithmetic"],
    )
    assert result.status == "not cured"
    assert {(a.outcome, a.reason) for a in result.tried} == {("too costly", "the held-out loss is not finite")}


def far_from(model):
    """A loss that is 0 for a model as it is, so that a re-ranged copy has to be tuned."""
    with torch.no_grad():
        whole = points(400, 7)
        aims = dict(zip(map(tuple, whole.tolist()), bilip.as_bijection(model)(whole), strict=True))

    def loss(model, batch):
        aim = torch.stack([aims[tuple(row)] for row in batch.tolist()])
        return (bilip.as_bijection(model)(batch) - aim).square().mean() + 0 * batch.sum()

    return loss


def test_what_is_frozen_stays_as_it_is_while_the_rest_is_tuned():
    torch.manual_seed(0)
    model = bilip_flow(-4.0)
    frozen, free = (model.bijection[0].t.layers[k].weight for k in (0, 2))
    frozen.requires_grad_(False)
    result = re_ranged(model, loss=far_from(model), train=points(400, 7), steps=5)
    assert result.chosen is not None, str(result)
    assert result.chosen.facts["steps"] == 5
    layers = result.model.bijection[0].t.net.layers
    assert torch.equal(layers[0].weight, frozen)
    assert not layers[0].weight.requires_grad
    assert not torch.equal(layers[2].weight, free)


def test_a_model_that_is_frozen_as_a_whole_is_not_tuned():
    torch.manual_seed(0)
    model = bilip_flow(-4.0).requires_grad_(False)
    result = inverted(model, train=points(400, 7), rungs=["penalties"])
    assert {a.outcome for a in result.tried} == {"skipped"}
    assert all("no parameter may be tuned" in a.reason for a in result.tried)


def test_train_may_be_whatever_gives_batches():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from points(100, 7)

    treated = copied(bilip_flow(-0.1))
    for train, size in (
        (points(400, 7).numpy(), 256),
        (Stream(), 100),
        (iter([points(50, 1), points(50, 2)]), 50),
        (torch.utils.data.TensorDataset(points(60, 1)), 60),
        ([{"x": points(30, 1), "y": torch.zeros(30)}], 30),
    ):
        tuning = Tuning.of(lambda model, batch: batch, train, None, treated, [])
        assert tuning is not None
        stream = tuning.batches()
        for _ in range(4):  # more than one pass
            assert first_of(next(stream)).shape == (size, 4)


def test_reading_a_loader_draws_none_of_the_callers_random_numbers():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points(300, 7)), 32, shuffle=True)
    model, before = bilip_flow(-0.1), torch.get_rng_state()
    inverted(model, train=loader, loss=lambda model, batch: -model.log_prob(batch[0]).mean())
    assert torch.equal(torch.get_rng_state(), before)


def test_held_out_batches_are_taken_as_they_are():
    treated = copied(bilip_flow(-0.1))
    lists = [torch.ones(3, 4), torch.zeros(2, 4)]
    for held_out, sizes in ((lists, [3, 2]), (torch.ones(300, 4), [256, 44]), (None, [30])):
        tuning = Tuning.of(None, points(300), held_out, treated, [])
        assert tuning is not None
        assert [len(batch) for batch in tuning.held_out] == sizes
        assert next(tuning.batches()).shape == (256, 4)


class TestBadInput:
    def test_a_model_that_cannot_be_copied(self):
        class Stubborn(nn.Module):
            def forward(self, x):
                return x

            def inverse(self, z):
                return z

            def __deepcopy__(self, memo):
                raise TypeError("one of a kind")

        with pytest.raises(InputError, match="cannot be copied"):
            cure(Stubborn(), points())

    def test_data_of_the_wrong_shape(self):
        with pytest.raises(InputError, match="takes no batch of shape"):
            cure(bilip_flow(), torch.randn(256, 5))

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"budget": "standard"}, "samples; .* good ones are needed"),
            ({"uses": ["flying"]}, "expected some of inversion"),
            ({"rungs": ["prayer"]}, "unknown rung"),
            ({"time": -1}, "expected a positive number"),
            ({"steps": 0}, "expected a whole number"),
            ({"uses": ["ood-inversion"]}, "there is no out-of-distribution source"),
            ({"loss": lambda model, batch: batch.sum()}, "needs batches"),
            ({"train": 3}, "expected a tensor"),
            ({"train": points(50), "loss": lambda model, batch: batch}, "expected a scalar"),
            ({"train": points(50), "loss": lambda model, batch: 1 / 0}, "ZeroDivisionError"),
            ({"train": points(50), "loss": lambda model, batch: {"nll": batch.sum()}}, "a mapping of nll"),
            ({"train": points(50), "loss": lambda model, batch: batch.sum(1)}, r"a tensor of shape \(5,\)"),
            ({"train": points(50), "loss": lambda model, batch: batch.sum() * 1j}, "a complex number"),
            ({"train": torch.randn(50, 5)}, "does not take its batches"),
            ({"train": []}, "it has no batch"),
            ({"train": iter(())}, "it has no batch"),
            ({"train": {"x": points(50)}}, "expected a tensor"),
            ({"train": "x.npy"}, "expected a tensor"),
            ({"train": (points(50), points(20))}, "50 and 20 rows"),
            ({"train": points(50), "held_out": []}, "it has no batch"),
            ({"uses": 3}, "expected a list of names"),
            ({"rungs": []}, "expected some of settings"),
            ({"most_cost": "much"}, "expected a number"),
            ({"time": True}, "expected a positive number"),
        ],
    )
    def test_one_line_for_the_rest(self, given, said):
        with pytest.raises(InputError, match=said) as caught:
            cure(bilip_flow(), points(300), **given)
        assert "\n" not in str(caught.value)


def test_an_autoregressive_flow_is_re_ranged_too():
    pytest.importorskip("zuko")
    torch.manual_seed(0)
    result = re_ranged(zuko_maf(-6.0))
    assert result.status == "cured", str(result)


def test_a_loss_with_parameters_is_copied_and_tuned_along():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, model, batch):
            x, y = batch
            logits = self.layer(bilip.as_bijection(model)(x))
            return {"loss": nn.functional.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    torch.manual_seed(0)
    head, x = Head(), points(1500, 7)
    before = head.layer.weight.clone()
    result = re_ranged(bilip_flow(-12.0), loss=head, train=(x, (x[:, 0] > 0).long()), steps=20)
    assert result.cured, str(result)
    assert torch.equal(head.layer.weight, before)
    assert isinstance(result.loss, Head)
    assert result.loss is not head
    assert 0 <= result.cost["accuracy"] <= 1


def test_a_loss_for_the_librarys_own_object_is_given_that():
    def nll(model, batch):
        z, log_det = model(batch)  # FrEIA's own call
        return (z.square().sum(1) / 2 - log_det).mean()

    pytest.importorskip("FrEIA")
    torch.manual_seed(0)
    result = inverted(freia_flow(), loss=nll, train=points(600, 7), rungs=["arithmetic"], all_rungs=True)
    assert result.tried[-1].outcome == "cured", str(result)
    assert abs(result.tried[-1].cost["rise"]) < 1e-2 * abs(result.held_out["loss"])


CURE = ("cure", "--data", "x.npy", "--out", "cured", "--ood", "")


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", torch.randn(700, 4, generator=torch.Generator().manual_seed(5)).numpy())
    torch.manual_seed(0)
    models.save(bilip_flow(), "broken")
    return command_line(monkeypatch, capfd)


def test_a_checkpoint_is_cured_and_comes_back(run):
    code, out, _ = run(*CURE, "broken", "--uses", "inversion")
    assert code == 0, out
    assert "Cured: inversion safe now" in out
    document = json.loads(Path("cured/cure.json").read_text())
    assert document["status"] == "cured"
    assert document["steps"][0]["rung"] == "arithmetic"
    assert bilip.AuditRecord.load("cured/before.json").verdicts["inversion"].status == "unsafe"
    assert bilip.AuditRecord.load("cured/after.json").verdicts["inversion"].status == "safe"
    model = bilip.cures.restore(models.load("broken"), "cured")
    x = torch.from_numpy(np.load("x.npy"))
    with torch.no_grad():
        back = model.bijection.inverse(model.bijection(x))
    assert float(((back - x).norm(dim=1) > 3.5e-4 * x.norm(dim=1)).double().mean()) < 0.01


def test_what_is_not_cured_ends_with_code_1_and_one_line(run):
    torch.manual_seed(0)
    models.save(bilip_flow(-15.0), "worse")
    code, out, err = run(*CURE, "worse", "--uses", "inversion")
    assert code == 1
    assert "Not cured" in out
    assert "Fine-tuning needs --train" in out
    assert err.strip() == "bilip: not cured: inversion"
    assert not Path("cured/model.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("cure", "broken"), "there is no data"),
        (("cure", "broken", "--data", "missing.npy"), "missing.npy"),
        (("cure", "broken", "--data", "x.npy", "--uses", "flying"), "expected some of inversion"),
        (("cure", "broken", "--data", "x.npy", "--out", "x.npy"), "it is a file"),
        (("cure", "broken", "--data", "x.npy", "--train", "nothing.npy"), "--train nothing.npy"),
        (("cure", "broken", "--data", "x.npy", "--rungs", "prayer"), "unknown rung"),
        (("cure", "broken", "--data", "x.npy", "--time", "-3"), "expected a positive number"),
        (("cure", "broken", "--data", "x.npy", "--loss", "math:pi"), "expected a function"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run, args, said):
    code, _, err = run(*args)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("out", "said"), [("broken", "--out broken is the model"), ("other", "it holds config.json")])
def test_no_cure_is_written_over_a_model(run, out, said):
    models.save(bilip_flow(), "other")
    held = {path: path.read_bytes() for path in sorted(Path(out).iterdir())}
    code, _, err = run("cure", "broken", "--data", "x.npy", "--ood", "", "--out", out, "--rungs", "re-range")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert {path: path.read_bytes() for path in sorted(Path(out).iterdir())} == held


def test_an_earlier_cure_that_is_read_is_not_overwritten(run):
    Path("cured").mkdir()
    np.save("cured/x.npy", np.load("x.npy"))
    Path("cured/cure.json").write_text("{}")
    Path("cured/x.npy").rename("cured/before.json")
    code, _, err = run("cure", "broken", "--data", "cured/before.json", "--out", "cured")
    assert (code, err.count("\n")) == (2, 1)
    assert "--out cured/before.json would overwrite" in err


def test_a_cure_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    inverted(bilip_flow(-0.3), rungs=["settings"]).save(tmp_path)
    held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = inverted(bilip_flow(-12.0), rungs=["settings"])

    def full(*_):
        raise InputError("No space left on device")

    monkeypatch.setattr("bilip.cures.result.seal", full)
    with pytest.raises(InputError, match="No space"):
        result.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held
    monkeypatch.undo()
    result.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before.json", "cure.json"]


@pytest.mark.usefixtures("own_rungs")
def test_ctrl_c_leaves_the_best_so_far(run):
    class Endless(Rung):
        name = "endless"
        place = 90

        def options(self, case):
            raise KeyboardInterrupt

    torch.manual_seed(0)
    models.save(bilip_flow(-12.0), "worse")
    code, out, _ = run(*CURE, "worse", "--rungs", "arithmetic,endless")
    assert code == 130
    assert "best so far" in out or "Not cured" in out
    assert Path("cured/cure.json").exists()


def test_means_of_what_explodes_are_no_place_to_move_channels_to(monkeypatch):
    """As where a few samples of data are infinitely far away, by whose mean every channel would be moved."""

    def moved(part, nets, *_):
        for net in nets:
            net.shift.fill_(1e30)

    monkeypatch.setattr(reranging, "_match_means", moved)
    assert re_ranged(bilip_flow(-12.0)).status == "cured"
