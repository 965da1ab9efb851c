"""The traps of each library, planted."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.distributions import transforms as t

import bilip
from adapters import zoo
from bilip.adapters import adapt, as_bijection
from bilip.errors import BilipError, InputError, NotInitialized
from bilip.testing import assert_invertible


def error(bijection, x, context=None):
    with torch.no_grad():
        return float((bijection.inverse(bijection(x, context), context) - x).abs().max())


# ---- the cached inverse


class Rounded(t.Transform):
    """A transform whose inverse is wrong by 0.1, hidden by its cache."""

    domain = codomain = torch.distributions.constraints.real
    bijective = True

    def _call(self, x):
        return 2 * x

    def _inverse(self, y):
        return y / 2 + 0.1

    def log_abs_det_jacobian(self, x, y):
        return torch.full_like(x, 2.0).log()


@pytest.mark.parametrize("wrap", ["bare", "inverse", "compose", "independent", "distribution"])
def test_a_cached_inverse_is_not_believed(wrap):
    transform = Rounded(cache_size=1)
    x = torch.randn(5, 2)
    y = transform(x)
    assert transform.inv(y) is x, "the trap is set"
    model = {
        "bare": lambda: transform,
        "inverse": lambda: transform.inv,
        "compose": lambda: t.ComposeTransform([transform, t.ExpTransform(cache_size=1)], cache_size=1),
        "independent": lambda: t.IndependentTransform(transform, 1, cache_size=1),
        "distribution": lambda: torch.distributions.TransformedDistribution(
            torch.distributions.Normal(torch.zeros(2), torch.ones(2)), [transform]
        ),
    }[wrap]()
    assert error(as_bijection(model), x) == pytest.approx(
        0.1 if wrap not in ("inverse", "distribution") else 0.2, rel=1e-4
    )


def test_pyro_inverts_for_real_and_can_be_copied():
    transforms = pytest.importorskip("pyro.distributions.transforms")
    coupling = transforms.affine_coupling(4, [8])
    x = torch.randn(64, 4)
    y = coupling(x)
    assert coupling.inv(y) is x, "the trap is set"
    block = as_bijection(coupling)
    assert 0 < error(block, x) < 1e-4
    copy.deepcopy(block)  # a cached tensor with a graph could not be copied
    block.forward_and_log_det(x)
    copy.deepcopy(block)
    assert torch.allclose(block.forward_and_log_det(x)[1], coupling.log_abs_det_jacobian(x, y), atol=1e-6)


@pytest.mark.parametrize("kind", ["Planar", "Radial", "Sylvester"])
def test_what_pyro_only_remembers_has_no_inverse(kind):
    transforms = pytest.importorskip("pyro.distributions.transforms")
    import pyro.distributions as dist

    transform = transforms.Sylvester(4, count_transforms=2) if kind == "Sylvester" else getattr(transforms, kind)(4)
    base = dist.Normal(torch.zeros(4), torch.ones(4)).to_event(1)
    for model in (transform, dist.TransformedDistribution(base, [transform])):
        with pytest.raises(InputError, match=f"{kind} has no inverse"):
            as_bijection(model)


def test_tensors_of_plain_transforms_are_converted():
    chain = as_bijection(zoo.torch_vector())
    assert {name for name, _ in chain.named_buffers()}
    double = copy.deepcopy(chain).double()
    x = torch.randn(3, 3)
    assert double(x.double()).dtype == torch.float64
    assert chain(x).dtype == torch.float32
    state = {name: 2 * value for name, value in double.state_dict().items()}
    double.load_state_dict(state)
    assert not torch.allclose(double(x.double()).float(), chain(x))


def test_elementwise_log_dets_are_summed():
    block = as_bijection(t.AffineTransform(0.0, 3.0))
    log_det = block.forward_and_log_det(torch.zeros(2, 4, 5))[1]
    assert torch.allclose(log_det, 20 * torch.tensor(3.0).log().expand(2))


def test_reshaping_transforms():
    block = as_bijection(t.ReshapeTransform((6,), (2, 3)), shape=(6,))
    assert block.out_shape((6,)) == (2, 3)
    assert block.forward_and_log_det(torch.zeros(4, 6))[1].tolist() == [0.0] * 4


# ---- batch statistics and starts from data


def test_batch_norm_follows_the_mode():
    transforms = pytest.importorskip("nflows.transforms")
    block = as_bijection(transforms.BatchNorm(3))
    x = 3 * torch.randn(64, 3) + 1
    block.train()(x)
    with pytest.raises(transforms.InverseNotAvailable):
        block.inverse(x)  # the library's own exception, unchanged
    block.eval()
    before = copy.deepcopy(block.state_dict())
    assert error(block, x) < 1e-5
    assert all(torch.equal(before[name], value) for name, value in block.state_dict().items())
    assert not torch.allclose(block(x), block.train()(x))


def test_pyro_batch_norm():
    transforms = pytest.importorskip("pyro.distributions.transforms")
    block = as_bijection(transforms.BatchNorm(3)).eval().double()
    x = torch.randn(6, 3, dtype=torch.float64)
    with torch.no_grad():
        block.module.module0.moving_variance.copy_(torch.tensor([0.5, 2.0, 4.0]))
    assert error(block, x) < 1e-12
    jacobian = torch.autograd.functional.jacobian(lambda v: block(v[None])[0], x[0])
    assert torch.allclose(block.forward_and_log_det(x)[1][0], torch.linalg.slogdet(jacobian)[1])


def normflows_act_norm():
    return pytest.importorskip("normflows").flows.ActNorm((3,))


def freia_act_norm():
    return pytest.importorskip("FrEIA.modules").ActNorm([(3,)])


@pytest.mark.parametrize("make", [normflows_act_norm, freia_act_norm])
def test_act_norm_does_not_start_from_an_audit(make):
    block = as_bijection(make())
    x = 5 * torch.randn(64, 3) + 2
    with pytest.raises(NotInitialized, match="ActNorm"):
        block.eval()(x)
    with pytest.raises(NotInitialized):
        block.train().inverse(x)  # it would start from latents
    z = block.train()(x)
    assert ((z.std(0) - 1).abs() < 0.1).all()
    block.eval()
    assert torch.equal(block(2 * x), block(2 * x))
    assert error(block, x) < 1e-4


def test_shapes_are_found_without_touching_the_model():
    normflows = pytest.importorskip("normflows")
    flow = normflows.NormalizingFlow(
        normflows.distributions.DiagGaussian((4, 2, 2)), [normflows.flows.ActNorm((4, 1, 1)), normflows.flows.Squeeze()]
    )
    with pytest.raises(NotInitialized):
        as_bijection(flow.eval(), shape=(1, 4, 4)).inverse(torch.zeros(1, 4, 2, 2))
    assert not bool(flow.flows[0].data_dep_init_done)


# ---- latents


def test_multi_scale_latents_are_joined_and_given_back():
    pytest.importorskip("normflows")
    model = zoo.normflows_multiscale()
    x = torch.randn(3, 1, 4, 4)
    parts, log_det = model.inverse_and_log_det(x)
    bijection = as_bijection(copy.deepcopy(model))
    back = bijection.inverse(torch.cat([part.flatten(1) for part in parts], 1))  # before any forward pass
    assert torch.allclose(back, x, atol=1e-4)
    z, ours = bijection.forward_and_log_det(x)
    assert z.shape == (3, 16)
    assert torch.allclose(ours, log_det, atol=1e-5)


def test_classes_reach_the_base():
    pytest.importorskip("normflows")
    model = zoo.normflows_multiscale(classes=True)
    with torch.no_grad():
        for base in model.q0:
            base.loc.add_(torch.randn_like(base.loc))
    adapted = adapt(model)
    x, y = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    z, log_det = adapted.bijection.forward_and_log_det(x, y)
    assert torch.allclose(adapted.base.log_prob(z, y) + log_det, model.log_prob(x, y), atol=1e-4)
    assert adapted.base.sample(4, y).shape == (4, 16)


def test_dropped_latents_are_noticed():
    class Drop(nn.Module):
        def forward(self, x):
            return x[:, :2], torch.zeros(len(x))

        def inverse(self, z):
            return torch.cat((z, torch.zeros_like(z)), 1)

    with pytest.raises(InputError, match="keeps every entry"):
        as_bijection(Drop())(torch.randn(3, 4))


# ---- noise


def test_dequantization_noise_is_not_hidden():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x), torch.zeros(len(x))

        def inverse(self, z):
            return z.floor()

    block = as_bijection(Noisy())
    x = torch.arange(8.0).view(2, 4)
    assert not torch.equal(block(x), block(x))
    assert error(block, x) == 0.0


def test_stochastic_log_dets_say_so():
    pytest.importorskip("FrEIA")
    chain = as_bijection(zoo.freia_residual())
    assert [block.stochastic_log_det for block in chain] == [True, False]
    x = torch.randn(4, 3)
    with torch.no_grad():
        first, second = (chain.forward_and_log_det(x) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not x.requires_grad, "the library marks its input"


def test_normflows_residual_does_not_mark_its_input():
    pytest.importorskip("normflows")
    block = as_bijection(zoo.normflows_residual())
    x = torch.randn(4, 3)
    with torch.no_grad():
        z, log_det = block.eval().forward_and_log_det(x)
    assert not any(value.requires_grad for value in (x, z, log_det))
    assert block.stochastic_log_det


def test_freia_residual_log_det_of_the_inverse_is_taken_at_the_preimage():
    pytest.importorskip("FrEIA")
    torch.manual_seed(0)
    chain = as_bijection(zoo.freia_residual()).double()[:1]
    with torch.no_grad():
        for p in chain.parameters():
            p.mul_(1.3)
    x = 2 * torch.randn(1, 3, dtype=torch.float64)
    z = chain(x).detach()
    draws = torch.stack([chain.inverse_and_log_det(z)[1].detach() for _ in range(40)])
    exact = -torch.linalg.slogdet(torch.autograd.functional.jacobian(lambda v: chain(v[None])[0], x[0]))[1]
    assert abs(float(draws.mean() - exact)) < 5 * float(draws.std()) / 40**0.5 + 1e-3


# ---- exceptions and wrong numbers


def test_exceptions_pass_through_unchanged():
    transforms = pytest.importorskip("nflows.transforms")
    block = as_bijection(transforms.Logit())
    with pytest.raises(transforms.InputOutsideDomain):
        block(torch.full((2, 3), 2.0))

    class Fails(nn.Module):
        def forward(self, x):
            assert False, "discriminant"  # noqa: B011, PT015

        inverse = forward

    with pytest.raises(AssertionError, match="discriminant"):
        as_bijection(Fails())(torch.zeros(1, 2))


def test_finite_but_wrong_values_are_passed_on():
    """Pyro clips its scales: the deep stack returns finite numbers that are not the input."""
    transforms = pytest.importorskip("pyro.distributions.transforms")
    torch.manual_seed(0)
    parts = []
    for _ in range(16):
        parts += [transforms.affine_coupling(8, [64]), transforms.Permute(torch.randperm(8))]
    chain = as_bijection(t.ComposeTransform(parts))
    x = 10 * torch.randn(64, 8)
    with torch.no_grad():
        back = chain.inverse(chain(x))
    assert torch.isfinite(back).all()
    with pytest.raises(AssertionError):
        assert_invertible(chain, x)


# ---- memory savers


def test_memcnn_does_not_free_the_input():
    pytest.importorskip("memcnn")
    model = zoo.memcnn_stack()
    x = torch.randn(3, 4)
    kept = x.clone()
    chain = as_bijection(model)
    z = chain(x)
    assert torch.equal(x, kept)
    assert error(chain, x) < 1e-5
    assert torch.allclose(z, model(x.clone()), atol=1e-6)
    assert not any(part.disable for part in model)
    torch.autograd.grad(chain(x.requires_grad_()).sum(), x, create_graph=True)  # its own function refuses .grad()


# ---- half-way houses


def test_freia_jac_false():
    pytest.importorskip("FrEIA")
    inn = zoo.freia_residual()
    x = torch.randn(2, 3)
    with pytest.raises(TypeError):
        inn(x, jac=False)
    chain = as_bijection(inn)
    assert error(chain, x) < 1e-5


def test_nflows_linear_cache_is_dropped_on_conversion():
    transforms = pytest.importorskip("nflows.transforms")
    linear = transforms.NaiveLinear(3, using_cache=True).eval()
    block = as_bijection(linear)
    with torch.no_grad():
        block(torch.randn(2, 3))
        block.double()
        assert error(block, torch.randn(2, 3, dtype=torch.float64)) < 1e-10


def nflows_one_way():
    transforms = pytest.importorskip("nflows.transforms")

    class OneWay(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs, inputs.new_zeros(len(inputs))

    return transforms.CompositeTransform([OneWay()])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pytest.importorskip("normflows").flows.Planar((2,)), "Planar has no inverse"),
        (lambda: pytest.importorskip("zuko").flows.GMM(2), "no inverse"),
        (lambda: pytest.importorskip("zuko").flows.MAF(2)(), "lazy flow"),
        (nflows_one_way, "OneWay has no inverse"),
        (t.AbsTransform, "has no inverse"),
        (t.SoftmaxTransform, "has no inverse"),
    ],
)
def test_one_way_models_are_refused_in_one_line(make, said):
    model = make()
    with pytest.raises(InputError, match=said):
        as_bijection(model)


def test_missing_conditions_are_asked_for():
    pytest.importorskip("FrEIA")
    with pytest.raises(BilipError, match="context"):
        as_bijection(zoo.freia_sequence(condition=True))(torch.randn(2, 4))
    pytest.importorskip("pyro")
    with pytest.raises(BilipError, match="context"):
        as_bijection(zoo.pyro_conditional())(torch.randn(2, 4))


@pytest.mark.process
def test_no_foreign_library_is_imported():
    import subprocess

    code = (
        "import sys, torch, bilip; from bilip.adapters import as_bijection; as_bijection((torch.exp, torch.log));"
        "print([m for m in ('nflows','FrEIA','normflows','zuko','pyro','glasflow','memcnn','torchdiffeq') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def standardised_normflows():
    normflows = pytest.importorskip("normflows")

    class Standardised(normflows.NormalizingFlow):
        def inverse_and_log_det(self, x):
            return super().inverse_and_log_det(x / 100)

        def log_prob(self, x):
            return super().log_prob(x / 100)

    return Standardised(normflows.distributions.DiagGaussian(4), [normflows.flows.Permute(4)])


def standardised_nflows():
    flows, transforms = pytest.importorskip("nflows.flows"), pytest.importorskip("nflows.transforms")
    distributions = pytest.importorskip("nflows.distributions")

    class Standardised(flows.Flow):
        def _log_prob(self, inputs, context):
            return super()._log_prob(inputs / 100, context)

    return Standardised(transforms.RandomPermutation(4), distributions.StandardNormal([4]))


def standardised_zuko():
    zuko = pytest.importorskip("zuko")

    class Standardised(zuko.flows.NICE):
        def forward(self, c=None):
            return super().forward(c)

    return Standardised(4)


def standardised_bilip():
    class Standardised(bilip.Flow):
        def log_prob(self, x, context=None):
            return super().log_prob(x / 100, context)

    return Standardised(bilip.models.real_nvp(4), shape=(4,))


def standardised_torch():
    from torch.distributions import Normal, TransformedDistribution
    from torch.distributions.transforms import AffineTransform

    class Standardised(TransformedDistribution):
        def log_prob(self, value):
            return super().log_prob(value / 100)

    return Standardised(Normal(torch.zeros(4), torch.ones(4)), [AffineTransform(0.0, 2.0)])


@pytest.mark.parametrize(
    "flow",
    [standardised_normflows, standardised_nflows, standardised_zuko, standardised_torch, standardised_bilip],
    ids=lambda f: f.__name__,
)
def test_a_flow_that_overrides_its_map_is_not_taken_for_its_layers(flow):
    with pytest.raises(InputError, match=r"defines its own \w+, which the layers of \w+ alone do not give"):
        as_bijection(flow())


def test_a_flow_with_a_loss_as_forward_is_its_layers():
    normflows = pytest.importorskip("normflows")

    class Trained(normflows.NormalizingFlow):
        def forward(self, x):
            return -self.log_prob(x).mean()

    flow = Trained(normflows.distributions.DiagGaussian(4), [normflows.flows.Permute(4)])
    x = torch.randn(3, 4)
    assert torch.equal(as_bijection(flow)(x), flow.inverse(x))
