"""Each use is judged by what it does: verdicts that were wrong once, on models whose truth is known."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import bilip
from bilip import Chain, Flow, blocks
from bilip.adapters import as_bijection
from bilip.auditing import BUDGETS
from bilip.auditing.reference import Reference, same_draws
from bilip.auditing.subject import Subject
from bilip.errors import InputError
from bilip.probes import Likelihood, LogDet, Reconstruction, Sampling
from catalogue import Map, zeros

QUICK = ["consistency", "reconstruction", "likelihood", "log_det", "sampling", "blame"]


def audit(model, x, *, probes=QUICK, **options):
    return bilip.audit(model, x, budget="quick", probes=probes, **options)


def statuses(record):
    return {use: v.status.value for use, v in record.verdicts.items()}


class RealNVP(nn.Module):
    """A correct one, written by hand: forward -> (z, log-determinant), inverse(z) -> (x, log-determinant)."""

    def __init__(self, features=4, blocks=4, forgotten=0.0):
        super().__init__()
        half = features // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, features)) for _ in range(blocks)
        )
        self.forgotten = forgotten

    def forward(self, x):
        log_det = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            log_det = log_det + scale.sum(1)
        return x * math.exp(self.forgotten), log_det

    def inverse(self, z):
        z = z * math.exp(-self.forgotten)
        log_det = z.new_zeros(len(z))
        for net in reversed(self.nets):
            b, a = z.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            z = torch.cat([a, (b - shift) * (-scale).exp()], 1)
            log_det = log_det - scale.sum(1)
        return z, log_det


# ---- inversion


def test_a_wrong_inverse_is_a_matter_of_inversion_and_not_of_the_likelihood():
    torch.manual_seed(0)
    sound = RealNVP()
    model = as_bijection(
        lambda x: sound(x)[0], inverse=lambda z: sound.inverse(z)[0] * 1.01, log_det=lambda x: sound(x)[1]
    )
    record = audit(model, torch.randn(1000, 4))
    assert statuses(record)["inversion"] == "unsafe"
    assert statuses(record)["likelihood"] == "safe"
    assert "a bug" in record.verdicts["inversion"].remedy


def test_correct_code_is_not_called_a_bug():
    """An affine flow with large weights fails by rounding: the condition at the failing samples says so."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = RealNVP(blocks=8)
        for p in model.parameters():
            p.data *= 3
        record = audit(model, {"test": 3 * torch.randn(1000, 4)}, ood=["uniform:4"])
        for verdict in record.verdicts.values():
            assert "a bug" not in verdict.remedy
        for m in record.find("blame"):
            assert m["cause"] in ("", "rounding")


def test_a_model_that_is_safe_in_float32_is_safe_in_float64():
    """An inverse that iterates to 1e-6 has three digits more than float32 needs, and fewer than sqrt(eps) of float64."""
    torch.manual_seed(0)
    model = as_bijection(
        lambda x: 2 * x, inverse=lambda z: z / 2 * (1 + 1e-6), log_det=lambda x: x.new_full((len(x),), 4 * math.log(2))
    )
    x = torch.randn(1000, 4)
    for data in (x, x.double()):
        found = bilip.Flow(model.to(data.dtype), shape=(4,))
        assert statuses(audit(found, data))["inversion"] == "safe"


def test_broken_weights_are_named_before_anything_else():
    torch.manual_seed(0)
    flow = Flow(bilip.models.real_nvp(4, blocks=3, hidden=(8,)))
    name, weight = next((n, p) for n, p in flow.bijection.named_parameters() if "1." in n and p.ndim == 2)
    weight.data[0, 0] = math.nan
    record = audit(flow, torch.randn(1000, 4))
    for use in ("inversion", "sampling", "likelihood"):
        assert record.verdicts[use].status == "unsafe"
        assert name in record.verdicts[use].remedy
        assert "1 of" in record.verdicts[use].remedy


# ---- sampling


def test_samples_far_outside_the_data_are_bad_however_well_they_are_inverted():
    """The identity, but latents beyond 2.9 are decoded as 1e20 times themselves; exactly invertible.

    P(|z| > 2.9) = 0.37 % an entry: 1.5 % of samples in four dimensions, against 0.1 % that are allowed.
    """

    def scale(v, edge):
        return torch.where(v.abs() > edge, 1e20, 1.0)

    explodes = Map(lambda x: x / scale(x, 1e19), lambda z: z * scale(z, 2.9), lambda x: -scale(x, 1e19).log().sum(1))
    flow = Flow(Chain(explodes, shape=(4,)))
    budget = replace(BUDGETS["quick"], bad_share=0.001, draws=8000, samples=8000)
    record = bilip.audit(flow, torch.randn(6000, 4).clamp(-2, 2), budget=budget, probes=["consistency", "sampling"])
    found = record.verdicts["sampling"]
    assert found.status == "unsafe"
    m = record.find("sampling")[0]
    assert m["out_of_range"] == m["bad"] > 0
    assert m["float64_bad"] == m["float64_tried"] > 0
    assert "the model itself decodes latents far outside" in found.remedy


@pytest.mark.parametrize(("size", "bad"), [(1.0, False), (1e6, True)])
def test_the_range_of_a_single_sample_is_no_less_than_its_size(size, bad):
    flow = Flow(as_bijection(Map(lambda x: x / size, lambda z: z * size, zeros)), shape=(4,))
    record = audit(flow, torch.ones(1, 4), probes=["sampling"])
    assert (record.find("sampling")[0]["out_of_range"] > 0) == bad


def test_heavy_tails_of_the_data_excuse_those_of_the_samples():
    torch.manual_seed(0)
    data = torch.randn(4000, 2)
    data[torch.rand(4000) < 0.02] *= 1e3  # as rare as it is in the samples below
    m = Sampling(1000).measure(Flow(Chain(blocks.Permutation.reverse(2), shape=(2,))), data)
    assert m["bad"] == 0


def coarse(x):
    """In float32 alone, half of the digits and more are lost."""
    return x if x.dtype == torch.float64 else x.bfloat16().to(x.dtype)


@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_only_decoding_matters_for_sampling(way):
    """Samples that equal the reference are sound though they do not encode back; wrong ones are found, and float64 offered."""
    flow = Flow(Chain(Map(**{way: coarse}), shape=(3,)))
    record = audit(flow, torch.randn(1000, 3), probes=["consistency", "sampling"])
    assert record.find("sampling")[0]["reencode_relative_max"] > 1e-3
    assert record.verdicts["sampling"].status == ("safe" if way == "forward" else "unsafe")
    assert ("in float64 0 of" in record.verdicts["sampling"].remedy) == (way == "inverse")


def test_the_decision_does_not_flip_with_the_seed():
    """0.5 % of samples are bad and 1 % is allowed, 0.1 % is not: never `unsafe` at 1 %, never `safe` at 0.1 %."""
    rare = Map(inverse=lambda z: torch.where((z[:, :1] > 2.576), math.nan, z))  # P = 0.5 %
    flow = Flow(Chain(rare, shape=(2,)))
    for seed in range(6):
        found = {}
        for allowed in (0.05, 0.001):
            budget = replace(BUDGETS["quick"], bad_share=allowed, draws=8000, samples=8000)
            record = bilip.audit(flow, torch.randn(50, 2), budget=budget, seed=seed, probes=["consistency", "sampling"])
            found[allowed] = record.verdicts["sampling"]
        assert found[0.05].status == "safe"
        assert found[0.001].status == "unsafe"
        low, high = found[0.001].interval
        assert low <= 0.005 <= high


# ---- likelihood


def test_the_log_likelihood_is_held_against_a_better_computed_one():
    """Round trips are exact; log p is off by 0.01 a dimension in float32 alone."""
    rounded = Map(
        log_det=lambda x: zeros(x) if x.dtype == torch.float64 else zeros(x) + 0.01 * x.shape[1], log_det_back=zeros
    )
    record = audit(Flow(Chain(rounded, shape=(8,))), {"test": torch.randn(1000, 8)}, ood=["uniform"])
    assert statuses(record)["inversion"] == "safe"
    assert statuses(record)["likelihood"] == statuses(record)["ood-likelihood"] == "unsafe"
    m = record.find("likelihood", "test")[0]
    assert m["worst_log_prob"] - m["worst_reference"] == pytest.approx(0.08, abs=1e-4)


def test_a_model_that_keeps_the_graph_of_its_last_call_has_a_reference():
    class Keeps(bilip.Bijection):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor([0.1, -0.2]))
            self.last = None, None

        def forward(self, x, context=None):
            z = x * self.log_scale.exp()
            if torch.is_grad_enabled():
                self.last = x, z
            return z

        def inverse(self, z, context=None):
            return z / self.log_scale.exp()

        def forward_and_log_det(self, x, context=None):
            return self(x), self.log_scale.sum().expand(len(x))

        def inverse_and_log_det(self, z, context=None):
            return self.inverse(z), -self.log_scale.sum().expand(len(z))

    model, x = Keeps(), torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    model(x).sum().backward()  # as training leaves it
    assert not model.last[1].is_leaf
    found = statuses(audit(bilip.Flow(model, shape=(2,)), x))
    assert found["likelihood"] == found["sampling"] == "safe"


class HalfInside(nn.Module):
    """A net that multiplies in float16 and gives back what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(8 * torch.randn(2, 2, generator=torch.Generator().manual_seed(0)))

    def narrow(self, x):
        return x.half()

    def forward(self, x):
        return torch.tanh((self.narrow(x) @ self.narrow(self.weight)).to(x.dtype) / 8)


class HalfAgain(HalfInside):
    """The same by a road that is not seen."""

    def narrow(self, x):
        return torch.empty(x.shape, dtype=torch.float16).copy_(x)


class CoupledBy(bilip.Bijection):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, context=None):
        a, b = x.chunk(2, 1)
        return torch.cat((a, b + 30 * self.net(a)), 1)

    def inverse(self, z, context=None):
        a, b = z.chunk(2, 1)
        return torch.cat((a, b - 30 * self.net(a)), 1)

    def forward_and_log_det(self, x, context=None):
        return self(x), x.new_zeros(len(x))

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), z.new_zeros(len(z))


def test_a_net_that_computes_in_fewer_bits_is_held_against_itself_in_float64():
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
    found = statuses(audit(bilip.Flow(CoupledBy(HalfInside()), shape=(4,)), x))
    assert found["inversion"] == "safe"  # both directions round alike
    assert found["sampling"] == "unsafe"  # the samples are not those of the net in float64, by some 1e-3
    exact = copy.deepcopy(CoupledBy(HalfInside())).double()
    exact.net.narrow = lambda value: value
    wide = x.double()
    found = Reference(Subject.of(CoupledBy(HalfInside())))
    for call, known in ((found.encode, exact), (found.decode, exact.inverse)):
        for _ in range(2):  # looked at, and known
            torch.testing.assert_close(call(x).value, known(wide), rtol=1e-14, atol=1e-14)


def test_a_net_that_computes_in_fewer_bits_whatever_is_done_leaves_no_reference():
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
    record = audit(bilip.Flow(CoupledBy(HalfAgain()), shape=(4,)), x)
    found = statuses(record)
    assert found["inversion"] == "safe"  # the round trip needs no reference
    for use in ("sampling", "likelihood"):
        assert found[use] == "not-measured"
        assert "multiplies in float16" in record.verdicts[use].reason


def test_a_likelihood_far_outside_is_judged_by_its_own_size():
    """|log p| is 5e5 out there; an error of 1e-6 of it is rounding and no defect."""
    flow = Flow(Chain(blocks.DiagonalScaling(torch.full((8,), 30.0)), shape=(8,)))
    record = audit(flow, {"test": torch.randn(1000, 8)}, ood=["scaled:30"])
    assert statuses(record)["ood-likelihood"] == "safe"
    assert abs(record.find("likelihood", "scaled:30")[0]["log_prob_median"]) > 1e5


def test_a_forgotten_layer_of_784_dimensions_is_found_exactly():
    torch.manual_seed(0)
    x = torch.rand(8, 784)
    for forgotten in (0.0, 0.02):
        m = LogDet(8, samples=1).measure(RealNVP(784, 2, forgotten), x)
        assert m["method"] == "exact"
        assert m["slogdet_error_max"] == pytest.approx(forgotten, abs=1e-6)
        assert m["slogdet_error_max_uncertainty"] < 1e-9


def test_large_blocks_with_a_structure_have_exact_log_determinants():
    torch.manual_seed(0)
    for model in (
        bilip.models.glow((4, 16, 16), levels=2, blocks=2, hidden=8, actnorm="identity"),
        bilip.models.glow((4, 16, 16), levels=2, blocks=2, hidden=8, actnorm="identity", factor_out=True),
    ):
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        m = LogDet(2, samples=1, exact=16).measure(model, torch.rand(2, 4, 16, 16))
        assert m["method"] == "exact"
        assert m["slogdet_error_max"] < 1e-6


def test_an_estimate_that_cannot_decide_is_not_measured():
    """Condition 1e6 and few Lanczos steps: the estimate is biased, and its uncertainty says so."""
    torch.manual_seed(0)
    a, b = torch.linalg.qr(torch.randn(96, 96))[0], torch.linalg.qr(torch.randn(96, 96))[0]
    matrix = a @ torch.diag(torch.logspace(-6, 0, 96)) @ b
    inverse, value = torch.linalg.inv(matrix.double()), float(torch.linalg.slogdet(matrix.double())[1])
    model = as_bijection(
        lambda x: x @ matrix.to(x.dtype).T,
        inverse=lambda z: (z.double() @ inverse.T).to(z.dtype),
        log_det=lambda x: x.new_full((len(x),), value),
    )
    m = LogDet(4, samples=1, exact=16, steps=12).measure(model, torch.randn(4, 96))
    assert m["method"] == "estimate"
    off, uncertainty = m["slogdet_error_max"], m["slogdet_error_max_uncertainty"]
    assert off <= uncertainty
    assert uncertainty > 1e-3


def test_random_log_determinants_are_compared_under_the_same_draws():
    estimates = Map(lambda x: 2 * x, lambda z: z / 2, lambda x: torch.randn_like(x).square().sum(1) * math.log(2))
    m = Likelihood().measure(Flow(Chain(estimates, shape=(4,))), torch.randn(300, 4))
    assert m["spread"] > 0.5
    assert m["bad"] == 0
    assert m["error_max"] < 1e-4
    with same_draws(3):
        first = torch.rand(5)
    with same_draws(3):
        assert torch.rand(5, dtype=torch.float64).equal(first.double())


def test_large_models_get_references_where_they_look_suspicious_and_at_random():
    def lost(x):
        """Wrong in float32 for one sample in 20, without any sign of it."""
        return torch.where((x.dtype == torch.float32) & (x[:, 0, 0, 0] > 1.645), 10.0, 0.0).to(x.dtype)

    shape = (2, 10, 10)
    x = torch.randn(1000, *shape, generator=torch.Generator().manual_seed(0))
    sound = Likelihood(referenced=64).measure(Flow(Chain(blocks.Permutation.reverse(2), shape=shape)), x)
    assert (sound["bad"], sound["referenced"]) == (0, 64)
    m = Likelihood(referenced=64).measure(Flow(Chain(Map(log_det=lost, log_det_back=zeros), shape=shape)), x)
    assert m["referenced"] == 1000  # one bad sample among those at random: nothing is taken on trust any more
    assert m["bad"] == int((x[:, 0, 0, 0] > 1.645).sum())


# ---- as you run it


def test_autocast_at_the_call_is_what_is_judged():
    torch.manual_seed(0)
    flow = Flow(bilip.models.real_nvp(8, blocks=6, hidden=(32,)))
    x = torch.randn(1000, 8)
    assert statuses(audit(flow, x))["likelihood"] == "safe"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record = audit(flow, x)
    assert record.settings["autocast"] == "bfloat16"
    assert statuses(record)["likelihood"] == "unsafe"
    assert "in float64 0 of" in record.verdicts["likelihood"].remedy
    given = audit(flow, x, autocast=torch.bfloat16)
    assert given.settings["autocast"] == "bfloat16"
    assert given.verdicts["likelihood"].value == record.verdicts["likelihood"].value
    assert not torch.is_autocast_enabled("cpu")


# ---- what models say


def test_every_normflows_residual_flow_samples():
    nf = pytest.importorskip("normflows")
    torch.manual_seed(0)
    layers = [
        nf.flows.Residual(nf.nets.LipschitzMLP([2, 16, 2], init_zeros=True, lipschitz_const=0.9), reduce_memory=False)
        for _ in range(2)
    ]
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(2, trainable=False), layers).eval()
    m = Sampling(64).measure(model, torch.randn(64, 2))
    assert m["share_failed"] == 0, m["failure"]
    assert m["bad"] == 0


def test_a_domain_error_of_nflows_is_told_in_words():
    pytest.importorskip("nflows")
    from nflows import distributions, flows, transforms

    torch.manual_seed(0)
    spline = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
        features=2, hidden_features=8, num_bins=4
    )
    flow = flows.Flow(spline, distributions.StandardNormal([2])).eval()
    with pytest.raises(InputError, match="outside the domain of the model.*linear tails"):
        audit(flow, 5 + torch.rand(100, 2))
    record = audit(flow, {"test": torch.rand(700, 2)}, ood=["uniform:3"], probes=["reconstruction"])
    m = record.find("reconstruction", "uniform:3")[0]
    assert m["share_failed"] > 0
    assert m["failure"]


def test_a_missing_context_is_told_in_words():
    zuko = pytest.importorskip("zuko")
    for model in (zuko.flows.MAF(2, 3, transforms=1), zuko.flows.NSF(2, 3, transforms=1)):
        with pytest.raises(InputError, match=r"conditional.*Pass \(x, context\)"):
            audit(model, torch.randn(50, 2))


def test_the_blame_looks_at_the_samples_that_fail():
    breaks = Map(inverse=lambda z: torch.where(z[:, :1] > 1.5, 3 * z, z))
    torch.manual_seed(0)
    x = torch.randn(1000, 3)
    x[:200] = x[:200].clamp(-1, 1)  # the first samples, which are all that 0.1 walked, come back
    model = Chain(blocks.Permutation.reverse(3), breaks, blocks.Permutation.reverse(3), shape=(3,))
    m = audit(model, x, probes=["reconstruction", "blame"]).find("blame")[0]
    assert m["guilty"] == "1"
    assert m["wrong"] == m["samples"] > 0


def test_no_block_is_named_unless_it_stands_out():
    model = stretched(20)
    record = audit(model, torch.randn(1000, 2), probes=["consistency", "reconstruction", "blame"])
    assert record.find("blame")[0]["guilty"] == "", record.find("blame")[0]["why"]
    assert "No block stands out" in record.verdicts["inversion"].remedy


def turn(x, angle):
    c, s = math.cos(angle), math.sin(angle)
    return x @ torch.tensor([[c, s], [-s, c]], dtype=x.dtype)


def stretched(count):
    """Equal blocks that each make an error grow four-fold, with turns between them."""
    scale, parts = torch.tensor([4.0, 0.25]), []
    for _ in range(count):
        parts.append(Map(lambda x: x * scale, lambda z: z / scale))
        parts.append(Map(lambda x: turn(x, 0.3), lambda z: turn(z, -0.3)))
    return Chain(*parts, shape=(2,))


def test_failing_samples_are_tried_again_in_float64():
    model = stretched(8)
    m = Reconstruction().measure(model, torch.randn(500, 2, generator=torch.Generator().manual_seed(0)))
    assert m["bad"] > 0
    assert m["float64_tried"] == min(m["bad"], 512)
    assert m["float64_bad"] == 0


def test_the_reference_has_a_base_and_an_embedding_in_float64_too():
    pytest.importorskip("nflows")
    from nflows import distributions, flows, transforms

    torch.manual_seed(0)
    embedding = nn.Linear(3, 4)
    base = distributions.ConditionalDiagonalNormal([2], context_encoder=nn.Linear(4, 4))
    made = transforms.MaskedAffineAutoregressiveTransform(features=2, hidden_features=8, context_features=4)
    flow = flows.Flow(made, base, embedding_net=embedding).eval()
    m = Likelihood().measure(flow, (torch.randn(100, 2), torch.randn(100, 3)))
    assert (m["bad"], m["unknown"]) == (0, 0)
    assert m["error_max"] < 1e-3
    assert embedding.weight.dtype == torch.float32


def test_without_a_finite_stored_gradient_memory_saving_ones_are_neither_right_nor_wrong():
    flow = Flow(bilip.models.real_nvp(4, blocks=2, hidden=(8,)))
    with torch.no_grad():
        next(flow.parameters())[0] = torch.nan
    record = audit(flow, torch.randn(200, 4), probes=["gradient_angle", "reconstruction"])
    assert statuses(record)["inversion"] == "unsafe"
    verdict = record.verdicts["reversible-gradients"]
    assert verdict.status.value == "not-measured"
    assert "no batch has a finite stored gradient" in verdict.reason


class Uncopied(Map):
    """x + 1, which cannot be copied; `wrong` is added to the way there alone, `far` to the way back."""

    def __init__(self, wrong=0.0, far=0.0):
        super().__init__(lambda x: x + 1 + wrong, lambda z: z - 1 + far, zeros)

    def __deepcopy__(self, memo):
        raise RuntimeError("this model is not copied")


@pytest.mark.parametrize(
    ("options", "status"), [({}, "not-measured"), ({"wrong": 0.1}, "not-measured"), ({"far": 1e3}, "unsafe")]
)
def test_samples_without_a_reference_are_neither_right_nor_wrong_unless_they_are_far_outside(options, status):
    """The encoding leads back to the latent, or does not: which of the two directions is right cannot be told."""
    record = audit(Flow(Uncopied(**options), shape=(4,)), torch.randn(1000, 4), probes=["consistency", "sampling"])
    verdict = record.verdicts["sampling"]
    assert verdict.status.value == status
    if status == "not-measured":
        assert "there is no float64 reference" in verdict.reason
        assert "not copied" in record.find("sampling")[0].notes[0]
