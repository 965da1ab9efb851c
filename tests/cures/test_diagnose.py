"""`bilip.diagnose` names the block and the operation where numbers stop being finite; `bilip.advise` the constants that keep them so."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import bilip
from adapters import zoo
from bilip.cures import NonFinite, Watch, watch
from bilip.errors import InputError


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def last(module):
    return [layer for layer in module.modules() if type(layer).__name__.endswith("Linear")][-1]


@torch.no_grad()
def bias(layer, value, rows=slice(None)):
    layer.bias[rows] = value


def nflows_flow(parts):
    from nflows import distributions, flows, transforms

    return flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([4]))


def nflows_affine(blocks=4):
    from nflows import transforms
    from nflows.nn.nets import ResidualNet

    mask = [[(k + j) % 2 for j in range(4)] for k in range(blocks)]
    return [transforms.AffineCouplingTransform(m, lambda i, o: ResidualNet(i, o, 8, num_blocks=1)) for m in mask]


def freia_flow(kind="GLOWCouplingBlock", **options):
    return zoo.freia(4, blocks=[(kind, {"subnet_constructor": net, **options})] * 4)


def normflows_flow(blocks=4, scale_map="exp"):
    import normflows as nf

    parts = [nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 8, 4]), scale_map=scale_map) for _ in range(blocks)]
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(4, trainable=False), parts)


def zuko_flow(kind="RealNVP", **options):
    import zuko

    return getattr(zuko.flows, kind)(4, transforms=4, hidden_features=(8,), **options)


# Each gives a model, what is asked (a batch, or latents), and the block and operation that it planted.


def huge_weights(model, module):
    """As after a step of a far too large learning rate: finite weights whose products overflow."""
    with torch.no_grad():
        last(module).weight.fill_(3e38)
    return model


def nflows_rate(k):
    parts = nflows_affine()
    return huge_weights(nflows_flow(parts), parts[k]), str(k), ("linear",)


def freia_rate(k):
    model = freia_flow()
    return huge_weights(model, model.module_list[k].subnet1), str(k), ("linear",)


def normflows_rate(k):
    model = normflows_flow()
    return huge_weights(model, model.flows[3 - k]), str(k), ("linear",)


def zuko_part(model, k):
    """The transform number k that has a net, and the name of its block."""
    part = [t for t in model.transform.transforms if hasattr(t, "hyper")][k]
    return part, next(name for name, p in bilip.as_bijection(model).parts() if p.module is part)


def zuko_rate(k, kind="RealNVP"):
    model = zuko_flow(kind)
    part, name = zuko_part(model, k)
    return huge_weights(model, part), name, ("linear",)


def normflows_scale(k, scale_map, operation):
    model = normflows_flow(scale_map=scale_map)
    bias(last(model.flows[3 - k]), -200.0, slice(1, None, 2))  # towards the latent it is exp(-s)
    return model, str(k), (operation,)


def normflows_masked_exp(k):
    import normflows as nf

    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    parts = [nf.flows.MaskedAffineFlow(mask, nf.nets.MLP([4, 8, 4]), nf.nets.MLP([4, 8, 4])) for _ in range(3)]
    bias(last(parts[2 - k].s), -200.0)
    return nf.NormalizingFlow(nf.distributions.DiagGaussian(4, trainable=False), parts), str(k), ("exp",)


def freia_exp(k, kind):
    model = freia_flow(kind=kind, clamp=200.0)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(0.01)
                layer.bias.mul_(0.01)
    bias(last(getattr(model.module_list[k], "subnet1" if kind == "GLOWCouplingBlock" else "subnet_s1")), 50.0)
    return model, str(k), ("exp",)


def zuko_exp(k):
    from zuko.transforms import MonotonicAffineTransform

    model = zuko_flow(univariate=partial(MonotonicAffineTransform, slope=1e-60))
    part, name = zuko_part(model, k)
    bias(last(part.hyper), 1e6, slice(1, None, 2))
    return model, name, ("exp",)


def nflows_division(k):
    from nflows import transforms

    parts = nflows_affine(2)
    parts.insert(k, transforms.PointwiseAffineTransform(shift=0.0, scale=1e-42))
    return nflows_flow(parts), str(k), ("div",)


def nflows_domain(k):
    from nflows import transforms
    from nflows.nn.nets import ResidualNet

    parts = nflows_affine(3)
    parts[k] = transforms.PiecewiseRationalQuadraticCouplingTransform(
        [0, 1, 0, 1], lambda i, o: ResidualNet(i, o, 8, num_blocks=1)
    )
    return nflows_flow(parts), str(k), ("InputOutsideDomain",)


def nflows_actnorm(k):
    from nflows import transforms

    parts = nflows_affine(2)
    parts.insert(k, transforms.ActNorm(4))
    return nflows_flow(parts).train(), str(k), ("log", "div", "reciprocal")


def freia_actnorm(k):
    blocks = [("PermuteRandom", {"seed": j}) for j in range(3)]
    blocks[k] = ("ActNorm", {})
    return zoo.freia(4, blocks=blocks).train(), str(k), ("log", "div", "reciprocal", "__rdiv__")


PLANTED = {
    **{f"nflows: a rate too high, block {k}": ("nflows", partial(nflows_rate, k), "batch") for k in (0, 3)},
    **{f"FrEIA: a rate too high, block {k}": ("FrEIA", partial(freia_rate, k), "batch") for k in (1, 2)},
    **{f"normflows: a rate too high, block {k}": ("normflows", partial(normflows_rate, k), "batch") for k in (0, 2)},
    "zuko: a rate too high, coupling 2": ("zuko", partial(zuko_rate, 2), "batch"),
    "zuko: a rate too high, autoregressive 1": ("zuko", partial(zuko_rate, 1, "MAF"), "batch"),
    **{f"normflows: exp, block {k}": ("normflows", partial(normflows_scale, k, "exp", "exp"), "batch") for k in (1, 3)},
    "normflows: exp of a masked block": ("normflows", partial(normflows_masked_exp, 1), "batch"),
    "FrEIA: exp of GLOW": ("FrEIA", partial(freia_exp, 2, "GLOWCouplingBlock"), "batch"),
    "FrEIA: exp of RNVP": ("FrEIA", partial(freia_exp, 1, "RNVPCouplingBlock"), "batch"),
    "zuko: exp": ("zuko", partial(zuko_exp, 1), "batch"),
    **{
        f"normflows: log of 0, block {k}": ("normflows", partial(normflows_scale, k, "sigmoid", "log"), "batch")
        for k in (0, 2)
    },
    "normflows: division by 0 in a sample": ("normflows", partial(normflows_scale, 1, "sigmoid", "div"), "latents"),
    "nflows: division by what underflows, in a sample": ("nflows", partial(nflows_division, 1), "latents"),
    "nflows: a spline outside of its domain": ("nflows", partial(nflows_domain, 1), "batch"),
    "nflows: ActNorm of a constant feature": ("nflows", partial(nflows_actnorm, 1), "constant"),
    "FrEIA: ActNorm of a constant feature": ("FrEIA", partial(freia_actnorm, 1), "constant"),
}


@pytest.mark.parametrize("name", list(PLANTED))
def test_the_planted_block_and_operation_are_named(name):
    library, make, asked = PLANTED[name]
    pytest.importorskip(library)
    torch.manual_seed(0)
    model, block, operations = make()
    x = torch.randn(16, 4) * 0.7
    if asked == "constant":
        x = torch.cat([torch.zeros(16, 1), x[:, 1:]], 1)
    found = bilip.diagnose(model, latents=x) if asked == "latents" else bilip.diagnose(model, x)
    assert found.found
    assert found.block == block, str(found)
    assert any(found.operation.startswith(operation) for operation in operations), str(found)
    assert found.remedy
    assert "\n" not in str(found)


class Shifted(bilip.Bijection):
    """Adds what a function of the block and of x gives; its methods do not say `self`."""

    def __init__(block, fault=lambda block, x: 0.1 * block.w):
        super().__init__()
        block.w, block.fault = nn.Parameter(torch.ones(4)), fault
        block.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        block.register_buffer("mean", torch.zeros(4))

    def forward_and_log_det(block, x, context=None):
        return x + block.fault(block, x), x.new_zeros(len(x))

    def inverse_and_log_det(block, z, context=None):
        return z, z.new_zeros(len(z))


class Own(torch.autograd.Function):
    """Finite forward, not backward."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


def attended(block, x):
    return ((x[:, :, None] * x[:, None] + block.mask).softmax(-1) * x[:, None]).sum(-1) * block.w


def assigned(x):
    x[0, 0] = math.inf
    return x


def recomputed(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


UNUSUAL = {
    "a mask of a buffer, and an overflow beside it": (
        lambda b, x: attended(b, x) + (1000 * b.w).exp(),
        "forward",
        "exp",
    ),
    "a row that is masked out altogether": (
        lambda b, x: (x * b.w).masked_fill(x < 9, -math.inf).softmax(1),
        "forward",
        "softmax",
    ),
    "a mask of a buffer that leaves nothing": (
        lambda b, x: (x * b.w + b.mask[:1, 1:2]).softmax(1),
        "forward",
        "softmax",
    ),
    "a mask that becomes the value": (lambda b, x: (x * b.w).masked_fill(x > 0, math.inf), "forward", "masked_fill"),
    "an entry that is set": (lambda b, x: assigned(x.clone()) * b.w, "forward", "__setitem__"),
    "a statistic that is not finite": (lambda b, x: x * b.w - (b.mean + math.inf), "forward", "add"),
    "inside vmap": (
        lambda b, x: torch.func.vmap(lambda row: (0 * row * b.w).log())(x),
        "forward",
        "log",
    ),
    "inside jvp": (
        lambda b, x: torch.func.jvp(lambda y: (y * b.w + 200).exp(), (x,), (x,))[1],
        "forward",
        "exp",
    ),
    "a function of one's own, backward": (lambda b, x: Own.apply(x * b.w), "backward", "Own"),
    "recomputed in the backward pass": (
        lambda b, x: recomputed(lambda y: (0 * y * b.w).abs().sqrt(), x),
        "backward",
        "sqrt",
    ),
    "from numpy": (lambda b, x: torch.from_numpy(x.detach().numpy() * np.inf) * b.w, "forward", "mul"),
}


@pytest.mark.parametrize("name", list(UNUSUAL))
def test_unusual_failures_are_named(name):
    fault, where, operation = UNUSUAL[name]
    torch.manual_seed(0)
    found = bilip.diagnose(bilip.Chain(Shifted(), Shifted(fault), Shifted()), torch.randn(8, 4))
    assert (found.where, found.block, found.operation) == (where, "1", operation), str(found)


@pytest.mark.parametrize(
    ("fault", "frozen"),
    [
        (attended, False),
        (lambda b, x: torch.func.vmap(lambda row: row * b.w)(x), False),
        (lambda b, x: x + (0 * b.w).abs().sqrt(), True),
    ],
    ids=["masked", "vmap", "a gradient that nobody takes"],
)
def test_what_is_finite_is_no_finding(fault, frozen):
    model = bilip.Chain(Shifted(), Shifted(fault))
    model[1].w.requires_grad_(not frozen)
    assert not bilip.diagnose(model, torch.randn(8, 4)).found


def test_a_distribution_that_refuses_what_is_not_finite_is_not_where_it_began():
    base = torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True)
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp"), base=base)
    with torch.no_grad():
        flow.bijection[1].t.layers[-1].bias.fill_(100.0)
    found = bilip.diagnose(flow, torch.zeros(4, 2))
    assert (found.where, found.block, found.operation) == ("forward", "1", "exp")


def test_infinities_that_are_masked_out_are_no_finding():
    def loss(model, x):
        worst = (1 / (x - x)).detach()  # infinite, and never used
        return model(x).square().mean() + 0 * torch.where(torch.isfinite(worst), worst, torch.zeros_like(worst)).sum()

    assert not bilip.diagnose(bilip.blocks.ActNorm(2, start="identity"), torch.randn(4, 2), loss=loss).found


def test_a_gradient_that_breaks_although_the_loss_is_finite():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return x + self.w.square().sum().sqrt()

        def inverse(self, z):
            return z - self.w.square().sum().sqrt()

    model = Root()
    found = bilip.diagnose(model, torch.randn(5, 2), loss=lambda model, x: model(x).square().mean())
    assert (found.where, found.operation) == ("backward", "sqrt")
    assert found.in_float64
    assert "derivative" in found.remedy


def test_the_sample_and_the_values_around_it():
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp"))
    with torch.no_grad():
        for block in flow.bijection:
            block.t.layers[-1].weight.mul_(0)
        weight = flow.bijection[0].t.layers[-1]
        weight.bias[1] = 95.0
    x = torch.zeros(6, 2)
    found = bilip.diagnose(flow, x)
    assert (found.block, found.operation, found.sample) == ("0", "exp", 0)
    assert found.inputs[0]["there"] == pytest.approx(95.0)
    assert found.value == math.inf
    assert found.in_float64 is False


def test_nothing_of_the_model_is_changed_and_a_finite_one_is_called_that():
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2)).train()
    before = {k: v.clone() for k, v in flow.state_dict().items()}
    assert not bilip.diagnose(flow, torch.randn(8, 2)).found
    assert all(torch.equal(v, before[k]) for k, v in flow.state_dict().items())
    assert flow.training
    assert all(p.grad is None for p in flow.parameters())


def test_broken_weights_and_a_broken_batch():
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2))
    assert bilip.diagnose(flow, torch.tensor([[0.0, 1.0], [math.nan, 0.0]])).sample == 1
    with torch.no_grad():
        flow.bijection[1].t.layers[0].weight[0, 0] = math.nan
    found = bilip.diagnose(flow, torch.zeros(2, 2))
    assert (found.where, found.block) == ("parameters", "1")


def test_a_buffer_that_overflowed_is_named():
    model = bilip.Chain(Shifted(), Shifted(lambda b, x: x * b.w - b.mean))
    model[1].mean[2] = math.inf
    found = bilip.diagnose(model, torch.randn(8, 4))
    assert (found.where, found.block, found.module) == ("parameters", "1", "blocks.1.mean")


def test_a_watched_training_stops_with_the_step_and_can_be_replayed(tmp_path):
    torch.manual_seed(0)
    flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp"))
    optimizer = torch.optim.SGD(flow.parameters(), lr=1e5)

    def nll(flow, x):
        return -flow.log_prob(x).mean()

    with pytest.raises(NonFinite) as caught, watch(flow, nll, save=tmp_path) as watching:
        for step in range(20):
            x = torch.randn(32, 2, generator=torch.Generator().manual_seed(step))
            loss = nll(flow, x)
            optimizer.zero_grad()
            loss.backward()
            watching.step(loss, x)
            optimizer.step()
    assert caught.value.step == watching.steps >= 2
    again = Watch.replay(bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp")), tmp_path, nll)
    assert (again.block, again.operation, again.sample) == tuple(
        getattr(caught.value.diagnosis, n) for n in ("block", "operation", "sample")
    )


def test_the_lightning_callback_stops_and_says_where():
    pl = pytest.importorskip("lightning.pytorch")
    from bilip.cures import DiagnoseCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp"))

        def training_step(self, batch, index):
            return -self.flow.log_prob(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e5)

    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(256, 2))
    trainer = pl.Trainer(
        max_steps=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DiagnoseCallback(lambda module: module.flow)],
    )
    with pytest.raises(NonFinite) as caught:
        trainer.fit(Module(), torch.utils.data.DataLoader(rows, 32))
    assert caught.value.diagnosis.block in ("0", "1")


def test_bad_input_is_one_line():
    with pytest.raises(bilip.errors.InputError, match="a batch, or latents="):
        bilip.diagnose(bilip.models.real_nvp(2))
    with pytest.raises(bilip.errors.InputError, match="does not exist"):
        Watch.replay(bilip.models.real_nvp(2), "nowhere")


class TestWhereItBegan:
    """What a replay must not be misled by; each loss fails in one line of its own."""

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))

    def find(self, loss, batch=None, model=None):
        torch.manual_seed(0)
        flow = model or bilip.Flow(bilip.models.real_nvp(4, blocks=2, hidden=(8,)))
        return bilip.diagnose(flow, self.x if batch is None else batch, loss=loss)

    def test_in_place_operations_have_overwritten_their_input(self):
        def loss(model, x):
            y = x.clone()
            y /= (torch.arange(16.0) - 3)[:, None]
            return y.sum() - model.log_prob(x).mean()

        found = self.find(loss)
        assert (found.where, found.operation, found.sample) == ("forward", "div_", 3)
        assert "division by 0" in found.remedy

    def test_what_is_masked_out_is_not_blamed(self):
        def loss(model, x):
            rare = torch.log(x * 0)
            kept = torch.where(torch.isfinite(rare), rare, torch.zeros_like(rare))
            return kept.sum() + (1000 * x.abs() + 100).exp().sum() - model.log_prob(x).mean()

        assert self.find(loss).operation == "exp"

    def test_a_number_that_a_narrow_dtype_cannot_hold(self):
        found = self.find(lambda model, x: (1e6 + x.abs()).to(torch.float16).sum() - model.log_prob(x).mean())
        assert (found.where, found.operation) == ("forward", "to")
        assert "too large for the dtype" in found.remedy

    def test_a_constant_that_is_not_finite(self):
        found = self.find(lambda model, x: torch.tensor(torch.nan) * model.log_prob(x).mean())
        assert (found.where, found.operation) == ("forward", "tensor")

    def test_a_target_that_is_not_finite_belongs_to_the_batch(self):
        y = torch.zeros(16)
        y[6] = torch.inf
        found = self.find(lambda model, batch: (model.log_prob(batch[0]) - batch[1]).mean(), (self.x, y))
        assert (found.where, found.operation, found.sample) == ("input", "batch, tensor 1", 6)

    def test_a_buffer_that_nothing_reads_breaks_nothing(self):
        flow = bilip.Flow(bilip.models.real_nvp(4, blocks=2, hidden=(8,)))
        flow.register_buffer("room", torch.full((3,), torch.nan))
        assert not self.find(None, model=flow).found

    def test_a_loss_that_float64_does_not_suit_says_nothing_about_float64(self):
        def loss(model, x):
            return (nn.functional.linear(x, torch.full((4, 4), 1e38))).square().sum() - model.log_prob(x).mean()

        found = self.find(loss)
        assert found.found
        assert found.in_float64 is None

    def test_random_numbers_are_those_that_would_come_next_and_stay_the_callers(self):
        def loss(model, x):
            return (x / nn.functional.dropout(torch.ones_like(x), 0.1)).sum() - model.log_prob(x).mean()

        flow = bilip.Flow(bilip.models.real_nvp(4, blocks=2, hidden=(8,)))
        torch.manual_seed(11)
        zero = int((nn.functional.dropout(torch.ones_like(self.x), 0.1) == 0).nonzero()[0][0])
        torch.manual_seed(11)
        before = torch.get_rng_state()
        found = bilip.diagnose(flow, self.x, loss=loss)
        assert (found.operation, found.sample, found.in_float64) == ("div", zero, True)
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_loss_that_is_none_is_named_by_who_asked(self):
        with pytest.raises(InputError, match=r"^diagnose\(loss=...\): it returned float"):
            self.find(lambda model, x: 1.0)


# ---- `bilip.advise`: what it allows is proved by bilip's own bounds for the code that it gives


@pytest.mark.parametrize(
    ("depth", "dtype", "box"),
    [(2, "float32", 4.0), (6, "float64", 4.0), (16, "float32", 1.0), (23, "float32", [-3.0, 2.0]), (1, "float16", 4.0)],
)
def test_the_code_it_gives_has_no_larger_bound_than_it_states(depth, dtype, box):
    torch.manual_seed(0)
    advice = bilip.advise(depth, dtype, box)
    for design in advice.designs:
        model = eval(design.code, {"bilip": bilip})
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(50.0)  # whatever the weights: nets at the constant that they are held to
        if design.blocks == "affine":  # where values stay in the box, block by block
            bound = model[0].bounds(bilip.Box(-advice.box, advice.box, shape=(2,)))
            stated = design.condition ** (1 / depth)
            assert model[0].scale.low == design.constants["scale from"]
        else:
            bound, stated = model.bounds(), design.condition
        assert bound.forward * bound.inverse <= stated * (1 + 1e-6), design
        assert design.error <= advice.tolerance


def test_the_tolerance_is_that_of_audits():
    assert bilip.advise(1, "float16").tolerance == pytest.approx(2.0**-5)
    assert bilip.advise(1, "float64").tolerance == bilip.advise(1).tolerance == pytest.approx(2.0**-11.5)


def test_more_bits_and_fewer_blocks_allow_more():
    def constants(*given):
        return [
            next(iter(d.constants.values())) if d.blocks != "affine" else d.constants["nets"]
            for d in bilip.advise(*given).designs
        ]

    assert all(a > b for a, b in zip(constants(16, "float64"), constants(16, "float32"), strict=True))
    assert all(a > b for a, b in zip(constants(4), constants(16), strict=True))


def test_a_round_trip_keeps_what_is_advised():
    torch.manual_seed(0)
    advice = bilip.advise(24)
    model = eval(advice.designs[0].code, {"bilip": bilip})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50.0)  # whatever the weights: the nets are held
        x = torch.rand(500, 2) * 8 - 4
        error = (model.inverse(model(x)) - x).abs().max()
    assert float(error) <= 4 * advice.tolerance


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0,), "whole number of blocks"),
        ((8, "int32"), "floating dtype"),
        ((8, "float32", -1.0), "positive number"),
        ((8, "float32", (2.0, 1.0)), "positive number"),
        ((64, "float16"), "more bits or fewer blocks"),
        ((8, "float32", "wide"), "positive number"),
        ((8, "float32", [1.0]), "positive number"),
        ({"depth": 8, "tolerance": 2.0}, "between 0 and 1"),
        ({"depth": 8, "features": 1}, "2 or more"),
    ],
)
def test_bad_input_of_advise_is_one_line(given, said):
    with pytest.raises(InputError, match=said):
        bilip.advise(**given) if isinstance(given, dict) else bilip.advise(*given)
