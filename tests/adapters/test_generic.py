"""bilip's own models, callables, modules with an inverse, and vector fields."""

import copy
import functools

import pytest
import torch
from torch import nn

import bilip
from bilip import models
from bilip.adapters import Adapted, Foreign, adapt, as_bijection, from_callables, from_vector_field, has_log_det
from bilip.blocks import Chain, Invert, NeuralODE
from bilip.errors import BilipError, InputError
from bilip.nets import MLP


def test_own_models_pass_through():
    trunk = models.real_nvp(4)
    assert as_bijection(trunk) is trunk
    flow = bilip.Flow(trunk)
    adapted = adapt(flow)
    assert isinstance(adapted, Adapted)
    assert (adapted.bijection, adapted.library) == (trunk, "bilip")
    x = torch.randn(5, 4)
    z, log_det = trunk.forward_and_log_det(x)
    assert torch.allclose(adapted.base.log_prob(z) + log_det, flow.log_prob(x))
    first, second = (adapted.base.sample(3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    classifier = models.classifier(models.glow((1, 4, 4), levels=1, blocks=1, hidden=4))
    assert as_bijection(classifier) is classifier.trunk


def test_a_shape_is_given_without_changing_the_model():
    block = bilip.blocks.ActNorm(3, start="identity")
    for model in (block, Chain(block, block)):
        shaped = as_bijection(model, shape=(3,))
        assert shaped.shape == (3,)
        assert model.shape is None
        assert shaped.bounds(bilip.Box(-1, 1)).inverse >= 1


def test_wrappers_are_opened():
    trunk = models.real_nvp(4)
    assert as_bijection(nn.DataParallel(trunk)) is trunk
    assert as_bijection(torch.compile(trunk, backend="eager")) is trunk


def test_own_flow_with_a_distribution_as_base():
    base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(4), torch.ones(4)), 1)
    adapted = adapt(bilip.Flow(models.real_nvp(4).double(), base))
    assert adapted.base.sample(3, generator=torch.Generator().manual_seed(1)).dtype == torch.float64
    assert adapted.base.log_prob(torch.zeros(2, 4)).shape == (2,)


NO_MODEL = [3, "model", None, {"a": 1}, torch.zeros(2)]
ONE_WAY = [nn.Linear(2, 2), torch.exp, nn.Sequential(nn.Linear(2, 2))]


@pytest.mark.parametrize(
    ("what", "said"), [(one, "is not a model") for one in NO_MODEL] + [(one, "has no inverse") for one in ONE_WAY]
)
def test_what_is_no_model_or_has_no_inverse_gets_a_sentence(what, said):
    with pytest.raises(InputError, match=said):
        as_bijection(what)


class Scale(nn.Module):
    """Forward and inverse of this house style and that."""

    def __init__(self, *, log_det=True, context=False):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 0.5, 4.0]))
        self.log_det = log_det

    def forward(self, x):
        z = x * self.weight
        return (z, self.weight.log().sum().expand(len(x))) if self.log_det else z

    def inverse(self, z):
        x = z / self.weight
        return (x, -self.weight.log().sum().expand(len(x))) if self.log_det else x


@pytest.mark.parametrize("log_det", [True, False])
def test_a_module_with_an_inverse(log_det):
    model = Scale(log_det=log_det)
    block = as_bijection(model)
    x = torch.randn(5, 3)
    assert block.kind == "Scale"
    assert torch.allclose(block.inverse(block(x)), x, atol=1e-6)
    assert has_log_det(block) == log_det
    if log_det:
        assert torch.allclose(block.forward_and_log_det(x)[1], torch.tensor(4.0).log().expand(5))
        assert torch.allclose(block.inverse_and_log_det(x)[1], -torch.tensor(4.0).log().expand(5))
    else:
        with pytest.raises(BilipError, match="no log-determinant"):
            block.forward_and_log_det(x)
        given = as_bijection(model, log_det=lambda x: model.weight.log().expand(len(x), 3))
        assert torch.allclose(given.forward_and_log_det(x)[1], torch.tensor(4.0).log().expand(5))
        assert torch.allclose(given.inverse_and_log_det(x)[1], -torch.tensor(4.0).log().expand(5))
    assert {id(p) for p in block.parameters()} == {id(model.weight)}
    assert as_bijection(model, shape=(3,)).out_shape((3,)) == (3,)


def test_methods_with_log_dets_are_preferred():
    class Both(Scale):
        def forward_and_log_det(self, x):
            return x * self.weight, self.weight.log().sum().expand(len(x))

    block = as_bijection(Both(log_det=False))
    assert block.forward_and_log_det(torch.zeros(2, 3))[1].shape == (2,)


def test_a_sequence_of_modules_is_a_chain():
    chain = as_bijection(nn.Sequential(Scale(), Scale(), models.real_nvp(3, coupling="additive")), shape=(3,))
    assert isinstance(chain, Chain)
    assert [getattr(block, "kind", None) for block in chain] == ["Scale", "Scale", None]
    x = torch.randn(4, 3)
    assert torch.allclose(chain.inverse(chain(x)), x, atol=1e-5)


@pytest.mark.parametrize("style", ["lambda", "method", "partial", "module", "pair"])
def test_callables_are_moved_and_copied_with_what_they_use(style):
    model = Scale(log_det=False)

    def scaled(factor, x):
        return factor * model(x)

    block = {
        "lambda": lambda: from_callables(lambda x: model(x), lambda z: model.inverse(z)),
        "method": lambda: as_bijection(model.forward, inverse=model.inverse),
        "partial": lambda: as_bijection(functools.partial(scaled, 1.0), inverse=model.inverse),
        "module": lambda: as_bijection(model, inverse=model.inverse),
        "pair": lambda: as_bijection((model, model.inverse)),
    }[style]()
    x = torch.randn(2, 3)
    before = block(x).detach()
    if style != "partial":  # a function inside a partial is not looked into
        assert {id(p) for p in block.parameters()} == {id(model.weight)}
        twin = copy.deepcopy(block).double()
        assert twin(x.double()).dtype == torch.float64
        assert torch.allclose(twin.inverse(twin(x.double())), x.double())
        with torch.no_grad():
            twin.module.get_parameter(next(iter(dict(twin.module.named_parameters())))).zero_()
    assert torch.equal(block(x), before)
    assert model.weight.dtype == torch.float32


GLOBAL = Scale(log_det=False)


def test_global_models_too():
    block = from_callables(lambda x: GLOBAL(x), lambda z: GLOBAL.inverse(z))
    twin = copy.deepcopy(block).double()
    assert twin(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64
    assert GLOBAL.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["context", "conditional", "c", "condition", "y", "anything"])
def test_context_is_passed_where_it_is_taken(name):
    space: dict = {}
    exec(f"def forward(x, {name}): return x + {name}\ndef inverse(z, {name}): return z - {name}", space)
    block = from_callables(space["forward"], space["inverse"])
    x, context = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(block(x, context), x + context)
    assert torch.allclose(block.inverse(x + context, context), x, atol=1e-6)


def test_flags_are_not_contexts():
    block = from_callables(lambda x, reverse=False: x + 1, lambda z, *, rev=True: z - 1)
    assert torch.equal(block(torch.zeros(1, 2), torch.ones(1, 2)), torch.ones(1, 2))


@pytest.mark.parametrize("style", ["list", "tuple", "spread", "with log-det"])
def test_several_latents_are_joined(style):
    def forward(x):
        parts = [2 * x[:, :1], x[:, 1:].view(-1, 3, 1)]
        if style == "tuple":
            return tuple(parts)
        return (parts, x.new_full((len(x),), 2.0).log()) if style == "with log-det" else parts

    def inverse(z):
        assert isinstance(z, tuple if style == "tuple" else list)
        return torch.cat((z[0] / 2, z[1].flatten(1)), 1)

    block = from_callables(forward, (lambda a, b: inverse([a, b])) if style == "spread" else inverse)
    x = torch.randn(5, 4)
    z = block(x)
    assert z.shape == (5, 4)
    assert torch.allclose(block.inverse(z), x)
    if style == "with log-det":
        assert block.forward_and_log_det(x)[1].tolist() == pytest.approx([0.6931472] * 5)


def test_log_det_kinds():
    x = torch.zeros(3, 4)
    for value in (0.5, torch.tensor(0.5), torch.full((3,), 0.5), torch.full((3, 1), 0.5), torch.full((1,), 0.5)):
        block = from_callables(lambda x, value=value: (x.clone(), value), lambda z: z)
        assert block.forward_and_log_det(x)[1].tolist() == [0.5] * 3


def test_repr_names_the_foreign_class():
    block = as_bijection(Scale())
    assert isinstance(block, Foreign)
    assert repr(block).startswith("Callables[Scale](")


def test_bad_pairs():
    with pytest.raises(InputError, match="callable"):
        from_callables(torch.exp, 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="inverse"):
        as_bijection(torch.exp, log_det=torch.exp)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, t, x):
        return self.net(x) * (1 + t)


def test_vector_fields():
    torchdiffeq = pytest.importorskip("torchdiffeq")
    field = Field().double()
    x = torch.randn(3, 2, dtype=torch.float64)
    options = {"rtol": 1e-8, "atol": 1e-8}
    flow = from_vector_field(field, **options)
    end = torchdiffeq.odeint(field, x, torch.tensor([0.0, 1.0], dtype=torch.float64), **options)[-1]
    assert torch.allclose(flow(x), end, atol=1e-6)
    assert torch.allclose(flow.inverse(end), x, atol=1e-6)
    log_det = flow.forward_and_log_det(x)[1]
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None])[0], x[0])
    assert torch.allclose(log_det[0], torch.linalg.slogdet(jacobian)[1], atol=1e-5)
    backward = from_vector_field(field, data_at="end", **options)
    assert isinstance(backward, Invert)
    assert torch.allclose(backward(x), flow.inverse(x), atol=1e-6)


def test_orders_of_a_field():
    pytest.importorskip("torchdiffeq")

    class Swapped(nn.Module):
        def forward(self, x, t):
            return -x * t

    class Unclear(nn.Module):
        def forward(self, a, b):
            return a

    class Optional(nn.Module):
        def forward(self, x, strength=1.0):
            return -x * strength

    x = torch.ones(1, 2)
    assert torch.allclose(from_vector_field(Swapped())(x), x * torch.exp(torch.tensor(-0.5)), atol=1e-3)
    with pytest.raises(InputError, match="which one is the time"):
        from_vector_field(Unclear())
    with pytest.raises(InputError, match="order"):
        from_vector_field(Unclear(), order="x;t")
    net = MLP(2, 2, hidden=(4,), activation="tanh", lipschitz=1.0)
    plain = from_vector_field(net, order="x")
    assert isinstance(plain, NeuralODE)
    assert plain.bounds().inverse <= 2.72
    optional = from_vector_field(Optional(), order="x")
    assert torch.allclose(optional(x), x * torch.exp(torch.tensor(-1.0)), atol=1e-3)
    joined = from_vector_field(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), order="cat")
    assert joined(torch.randn(4, 2)).shape == (4, 2)
    assert joined.bounds().forward >= 1


class Flagged(nn.Module):
    """One call for both ways, in the ways that people write it."""

    def __init__(self, log_det=True):
        super().__init__()
        self.weight, self.log_det = nn.Parameter(torch.tensor([2.0, 0.5, 4.0])), log_det

    def both(self, x, turned, context=None):
        shift = 0 if context is None else context
        out = (x - shift) / self.weight if turned else x * self.weight + shift
        total = self.weight.log().sum().expand(len(x))
        return (out, -total if turned else total) if self.log_det else out


class Reverse(Flagged):
    def forward(self, x, reverse=False):
        return self.both(x, reverse)


class Rev(Flagged):
    def forward(self, x, c=None, *, rev=False):
        return self.both(x, rev, c)


class Needed(Flagged):
    def forward(self, x, inverse):
        return self.both(x, inverse)


class Conditional(Flagged):
    def forward(self, x, cond, logdet=None, reverse=False):
        return self.both(x, reverse, cond)


@pytest.mark.parametrize(
    ("kind", "flag", "context"),
    [
        (Reverse, "reverse", False),
        (Rev, "rev", False),
        (Rev, "rev", True),
        (Needed, "inverse", False),
        (Conditional, "reverse", True),
    ],
)
@pytest.mark.parametrize("log_det", [True, False])
def test_a_flag_of_forward_turns_a_model_round(kind, flag, context, log_det):
    model = kind(log_det)
    adapted = adapt(model)
    x, c = torch.randn(5, 3), torch.randn(5, 3) if context else None
    z = adapted.bijection(x, c)
    assert torch.equal(z, x * model.weight + (0 if c is None else c))
    assert torch.allclose(adapted.bijection.inverse(z, c), x, atol=1e-6)
    assert has_log_det(adapted.bijection) == log_det
    if log_det:
        assert torch.allclose(adapted.bijection.forward_and_log_det(x, c)[1], torch.full((5,), 4.0).log())
    ((_, block),) = adapted.bijection.parts()
    assert block.called == f"{kind.__name__}(x, {flag}=False) and {kind.__name__}(z, {flag}=True)"
    double = copy.deepcopy(adapted.bijection).double()
    assert double.inverse(z.double(), None if c is None else c.double()).dtype == torch.float64
    assert model.weight.dtype == torch.float32
    assert sum(p.numel() for p in adapted.bijection.parameters()) == 3


def test_an_audit_says_how_it_called_a_model_with_a_flag():
    x, probes = torch.randn(300, 3), ["consistency", "reconstruction", "log_det"]
    record = bilip.audit(Reverse(), x, budget="quick", probes=probes, description="scales three features")
    assert record.model["description"] == "scales three features"
    assert record.verdicts["inversion"].status != "unsafe"
    assert record.find("reconstruction")[0]["share_bad"] == 0
    assert record.model["called"] == "Reverse(x, reverse=False) and Reverse(z, reverse=True)"
    assert "called as Reverse(x, reverse=False)" in bilip.report.to_markdown(record)


def test_flags_that_mean_something_else_are_not_taken():
    class Odd(nn.Module):
        def forward(self, x, reverse="no", direction=1):
            return x

    with pytest.raises(InputError, match="has no inverse that bilip knows of"):
        as_bijection(Odd())


def test_a_flag_that_is_ignored_is_found_by_the_audit():
    class Deaf(nn.Module):
        def forward(self, x, reverse=False):
            return 2 * x

    record = bilip.audit(Deaf(), torch.randn(300, 3), budget="quick", probes=["consistency", "reconstruction"])
    assert record.verdicts["inversion"].status == "unsafe"


def test_an_adapter_with_the_old_names_works_and_is_told_the_new_ones():
    with pytest.warns(DeprecationWarning, match="is now called") as told:

        class Doubled(Foreign):
            def push(self, x, context, *, log_det):
                return 2 * x, None

            def pull(self, z, context, *, log_det):
                return z / 2, None

            def twin(self):
                return bilip.blocks.DiagonalScaling(torch.full((2,), 2.0))

    assert [str(w.message) for w in told] == [f"Doubled.{a} is now called {b}." for a, b in OLD_NAMES]
    block, x = Doubled(nn.Identity()), torch.ones(1, 2)
    assert torch.equal(block.inverse(block(x)), x)
    assert block.native().bounds().forward == pytest.approx(2.0)


OLD_NAMES = (("push", "encode"), ("pull", "decode"), ("twin", "native"))
