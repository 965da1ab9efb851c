import copy
import math

import pytest
import torch
from torch.distributions import Independent, Normal, Uniform

from bilip import Box, Chain, Flow, Invert, blocks, models
from bilip.blocks import Squeeze
from bilip.blocks.factor_out import OnKept
from bilip.errors import BilipError, InputError, NoGlobalBound
from bilip.nets import MLP, Declared
from bilip.reversible import Reversible
from catalogue import CATALOGUE, wake


def test_slices_share_blocks_and_know_their_shape():
    trunk = models.glow((3, 8, 8), levels=2, blocks=2, hidden=4, actnorm="identity")
    head, tail = trunk[:5], trunk[5:]
    assert head[0] is trunk[0]
    assert tail.shape == head.latent_shape == trunk[:5].out_shape((3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(tail(head(x)), trunk(x))
    assert isinstance(trunk[-1], blocks.AffineCoupling)
    assert trunk[1:].shape == (12, 4, 4)
    assert trunk[-3:].shape is not None
    assert len(trunk[::2]) == math.ceil(len(trunk) / 2)


def test_parts_multiply():
    model = models.real_nvp(4, blocks=4, coupling="additive")
    whole, first, second = model.bounds(), model[:2].bounds(), model[2:].bounds()
    both = first.then(second)
    assert both.log_forward == pytest.approx(whole.log_forward)
    assert both.log_inverse == pytest.approx(whole.log_inverse)
    assert len(whole.blocks) == 4


@pytest.mark.parametrize(
    "wrap",
    [Chain, Invert, lambda block: blocks.FactorOut(block, (4,), keep=2), lambda block: OnKept(block, (2,)), Reversible],
    ids=["Chain", "Invert", "FactorOut", "OnKept", "Reversible"],
)
def test_wrappers_know_whether_an_inverse_is_iterated(wrap):
    assert not wrap(blocks.Residual(MLP(2, 2, lipschitz=0.5))).closed_form
    assert wrap(blocks.Permutation.reverse(2)).closed_form


INSIDE = {
    "Invert": Invert,
    "FactorOut": lambda block: blocks.FactorOut(block, (4,), keep=2),
    "OnKept": lambda block: OnKept(block, (2,)),
    "Wrapped": blocks.Wrapped,
}


@pytest.mark.parametrize("wrap", INSIDE.values(), ids=INSIDE)
def test_wrappers_have_the_facts_of_what_they_hold(wrap):
    inner = blocks.AffineCoupling(MLP(1, 2))
    around = wrap(inner)
    assert wrap(blocks.Permutation.reverse(2)).rearranges
    assert not around.rearranges
    assert not around.volume_preserving
    assert around.has_log_det
    inner.has_log_det = False  # as a foreign block that finds out when it is called
    assert not around.has_log_det


def test_wrappers_are_copied_and_keep_their_names_in_checkpoints():
    """What is set on a wrapper comes before what it holds, in a copy as well."""
    around = Invert(blocks.ActNorm(2))
    around.shape = (2,)
    again = copy.deepcopy(around)
    assert again.shape == (2,)
    assert next(iter(again.state_dict())).startswith("bijection.")


def test_proofs_of_a_part_that_acts_on_some_entries():
    block, box = blocks.DiagonalScaling(torch.tensor([4.0, 2.0])), Box(-1, 1, shape=(3,))
    bound = OnKept(block, (2,)).bounds(box)
    assert bound.forward == pytest.approx(4.0)
    assert bound.inverse == pytest.approx(1.0)  # of the entry that is passed on
    assert bound.image.high.tolist() == pytest.approx([4.0, 2.0, 1.0])
    back = OnKept(block, (2,)).bounds(latent=bound.image)
    assert back.domain.high.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_flow_has_what_its_bijection_has():
    trunk = models.real_nvp(4, blocks=2)
    flow, x = Flow(trunk), torch.randn(5, 4)
    assert torch.equal(flow(x), trunk(x))
    assert torch.equal(flow.inverse(x), trunk.inverse(x))
    assert torch.equal(flow.forward_and_log_det(x)[1], trunk.forward_and_log_det(x)[1])
    assert flow.bounds(Box(-1, 1)).log_inverse == trunk.bounds(Box(-1, 1)).log_inverse
    assert (flow.shape, flow.closed_form, len(flow.parts())) == ((4,), True, 2)
    with pytest.raises(AttributeError, match="no attribute 'config_of'"):
        flow.config_of  # noqa: B018 - only what every bijection has
    assert torch.equal(copy.deepcopy(flow)(x), trunk(x))


@pytest.mark.parametrize("entry", CATALOGUE, ids=[e.name for e in CATALOGUE])
def test_parts_compose_to_the_map(entry):
    model = wake(entry.make()).double().eval()
    x, context = entry.batch(), entry.contexts()
    walk = x
    for _, part in model.parts():
        walk = part(walk, context)
    z = model(x, context)
    assert torch.allclose(walk, z.reshape(walk.shape), atol=1e-10)


def test_parts_reach_into_the_multi_scale_architecture():
    model = wake(models.glow((3, 8, 8), levels=3, blocks=2, hidden=8, factor_out=True)).double().eval()
    names = [name for name, _ in model.parts()]
    assert len(names) == len(set(names)) > 18
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    z, total = x, 0
    for _, part in model.parts():
        z, log_det = part.forward_and_log_det(z)
        total = total + log_det
    expected, log_det = model.forward_and_log_det(x)
    assert torch.allclose(z, expected)
    assert torch.allclose(total, log_det)
    for _, part in reversed(model.parts()):
        z = part.inverse(z)
    assert torch.allclose(z, x, atol=1e-8)


def test_parts_of_an_inverted_chain():
    chain = models.real_nvp(4, blocks=3).eval()
    inverted = Chain(Invert(chain), shape=(4,))
    z = torch.randn(5, 4)
    walk = z
    for _, part in inverted.parts():
        walk = part(walk)
    assert torch.allclose(walk, chain.inverse(z), atol=1e-6)


def test_double_inversion():
    model = models.real_nvp(4, blocks=2, scale="half_sigmoid")
    x = torch.randn(3, 4)
    twice = Invert(Invert(model))
    assert torch.equal(twice(x), model(x))
    box = Box(-1, 1)
    assert twice.bounds(box).log_inverse == pytest.approx(model.bounds(box).log_inverse)
    swapped = Invert(model).bounds(latent=box)
    assert swapped.forward == pytest.approx(model.bounds(box).inverse)


def test_logit_makes_affine_chains_globally_bounded():
    """Everywhere, for a chain that begins with a logit, means on [0, 1]: a bounded set."""
    chain = Chain(blocks.Logit(0.05), blocks.AffineCoupling(MLP(2, 4), scale="half_sigmoid"), shape=(4,))
    assert chain.bounds().inverse < math.inf
    assert chain.bounds().domain == Box(0, 1, shape=(4,))
    with pytest.raises(InputError, match=r"defined on \[0, 1\]"):
        chain.bounds(Box(-1, 1))
    with pytest.raises(NoGlobalBound, match="with the shape of one sample"):
        Chain(*chain).bounds()  # without a shape nothing can be enclosed
    assert Invert(Invert(chain)).bounds().inverse == pytest.approx(chain.bounds().inverse)
    assert Chain(Squeeze(), blocks.Logit(0.1), shape=(1, 4, 4)).bounds().domain == Box(0, 1, shape=(1, 4, 4))
    with pytest.raises(NoGlobalBound):
        chain[1:].bounds()


def test_affine_block_with_a_constant_scale_has_a_global_bound():
    block = blocks.AffineCoupling(MLP(2, 2), MLP(2, 2, zero_init=True))
    assert block.bounds().forward < math.inf


def test_overflow_is_said():
    torch.manual_seed(0)
    model = models.real_nvp(2, blocks=24, hidden=(32,), scale="exp")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    bound = model.bounds(Box(-10, 10))
    assert bound.forward == math.inf
    assert any("+inf" in line and "left the range of float64" in line for line in bound.remarks())
    assert "+inf" in bound.table()


def test_an_unbounded_context_is_said():
    block = blocks.AffineCoupling(MLP(2, 4, context=2), scale="sigmoid")
    box = Box(-1, 1, shape=(4,))
    assert any("context was not bounded" in line for line in block.bounds(box).remarks())
    assert block.bounds(box, context=Box(-1, 1, shape=(2,))).inverse < math.inf


def test_magnitudes_are_of_outputs_in_both_directions():
    chain = Chain(
        blocks.DiagonalScaling(torch.tensor([10.0, 10.0])), blocks.DiagonalScaling(torch.tensor([0.5, 0.5])), shape=(2,)
    )
    for bound in (chain.bounds(Box(-1, 1)), chain.bounds(latent=Box(-5, 5))):
        assert [round(row.magnitude, 6) for row in bound.blocks] == [10.0, 5.0]


def test_missing_maps_are_said():
    class Half(blocks.Bijection):
        def forward(self, x, context=None):
            return x

    with pytest.raises(BilipError, match="Half defines no inverse"):
        Half().inverse(torch.ones(1, 2))


def test_context_reaches_only_the_nets_that_take_it():
    chain = Chain(
        blocks.AdditiveCoupling(Declared(torch.nn.Tanh(), lipschitz=1.0)), blocks.AdditiveCoupling(MLP(2, 2, context=3))
    )
    x, context = torch.randn(5, 4), torch.randn(5, 3)
    assert torch.allclose(chain.inverse(chain(x, context), context), x, atol=1e-5)
    rows = blocks.AdditiveCoupling(MLP(2, 2, context=2), blocks.Split(dim=-1))
    assert rows.bounds(Box(-1, 1, shape=(3, 4))).forward < math.inf


def test_tables_name_the_first_block_beyond_precision():
    model = Chain(*(blocks.DiagonalScaling(torch.tensor([1.0, 1e-3])) for _ in range(4)), shape=(2,))
    bound = model.bounds()
    assert bound.first_beyond_precision().name == "2"  # 1e9 > 2^23
    assert bound.first_beyond_precision("forward") is None
    assert "passes 1/eps = 8.4e+06 at block 2 (DiagonalScaling)" in bound.table()
    assert model.double().bounds().first_beyond_precision() is None  # 1e12 < 2^52
    assert "12.00" in bound.table()


def test_log_prob_against_torch_distributions():
    flow = Flow(blocks.DiagonalScaling(torch.tensor([2.0, 0.5])), shape=(2,))
    x = torch.randn(6, 2)
    expected = Independent(Normal(torch.zeros(2), torch.tensor([0.5, 2.0])), 1).log_prob(x)
    assert torch.allclose(flow.log_prob(x), expected, atol=1e-5)
    free = Flow(flow.bijection, Uniform(torch.full((2,), -9.0), torch.full((2,), 9.0), validate_args=False))
    assert torch.allclose(free.log_prob(x), torch.full((6,), -2 * math.log(18)), atol=1e-5)
    assert free.sample(4).shape == (4, 2)


def test_density_integrates_to_one():
    torch.manual_seed(0)
    flow = Flow(models.real_nvp(2, blocks=4, hidden=(16,), activation="tanh", scale="half_sigmoid")).double()
    axis = torch.linspace(-14, 14, 561, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    mass = float(flow.log_prob(grid).detach().exp().sum()) * float(axis[1] - axis[0]) ** 2
    assert mass == pytest.approx(1, abs=1e-3)


def test_samples_and_bits():
    flow = Flow(models.glow((3, 8, 8), levels=2, blocks=1, hidden=4, factor_out=True, actnorm="identity"))
    assert flow.sample(5, generator=torch.Generator().manual_seed(0)).shape == (5, 3, 8, 8)
    x = torch.rand(2, 3, 8, 8)
    bits = flow.bits_per_dim(x)
    assert torch.allclose(bits, 8 - flow.log_prob(x) / (192 * math.log(2)))
    assert float(flow.sample_base(2, temperature=0.0).abs().max()) == 0


def test_conditional_flow():
    torch.manual_seed(0)
    flow = Flow(models.real_nvp(2, blocks=4, context=3))
    context = torch.randn(5, 3)
    assert flow.sample(5, context).shape == (5, 2)
    x = torch.randn(5, 2)
    assert not torch.allclose(flow.log_prob(x, context), flow.log_prob(x, context + 1))
    with pytest.raises(InputError, match="pass context="):
        flow.log_prob(x)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Chain([Squeeze()]), r"Chain\(\*blocks\)"),
        (lambda: Chain(Squeeze(), shape=(3, 5, 5)), "divisible by 2"),
        (
            lambda: Chain(Squeeze(), shape=(3, 4, 4))(torch.ones(1, 3, 8, 8)),
            r"expected input samples of shape \(3, 4, 4\)",
        ),
        (
            lambda: Chain(Squeeze(), shape=(3, 4, 4)).inverse(torch.ones(1, 3, 4, 4)),
            r"latent samples of shape \(12, 2, 2\)",
        ),
        (lambda: Squeeze()(torch.ones(1, 3, 4)), "expected images"),
        (lambda: Squeeze()(torch.ones(1, 3, 4, 4, dtype=torch.long)), r"Convert it with x.float\(\)"),
        (lambda: Squeeze()([1]), "expected a tensor, got list"),
        (lambda: blocks.ActNorm(3, start="identity")(torch.ones(3)), r"Add a batch dimension with x\[None\]"),
        (lambda: blocks.ActNorm(3, start="identity")(torch.ones(2, 4)), "expected 3 features along dimension 1"),
        (
            lambda: blocks.ActNorm(3, start="identity")(torch.ones(2, 3).double()),
            r"input is torch.float64, the parameters are torch.float32",
        ),
        (
            lambda: blocks.ActNorm(3, start="identity").to("meta")(torch.ones(2, 3)),
            "input is on cpu, the parameters on meta",
        ),
        (lambda: models.real_nvp(4)(torch.ones(2, 4).double()), "Convert one of them"),
        (lambda: blocks.AdditiveCoupling(MLP(2, 3))(torch.ones(1, 4)), r"t\(x1\) has shape \(1, 3\)"),
        (lambda: blocks.AdditiveCoupling(MLP(2, 1))(torch.ones(1, 4)), r"t\(x1\) has shape \(1, 1\)"),
        (lambda: blocks.AdditiveCoupling(torch.sin), "must be an nn.Module"),
        (lambda: blocks.AffineCoupling(MLP(2, 3))(torch.ones(1, 4)), "even number of features"),
        (
            lambda: blocks.AffineCoupling(MLP(2, 4)).bounds(Box(-1, 1)),
            r"Give the box a shape: bilip.Box\(-4, 4, shape=\(2,\)\)",
        ),
        (lambda: models.real_nvp(4).bounds(Box(-1, 1, shape=(3,))), r"box has shape \(3,\)"),
        (lambda: models.real_nvp(4).bounds((-1, 1)), "expected a bilip.Box"),
        (lambda: models.real_nvp(4).bounds(formula="best"), "expected one of 'sharp', 'paper'"),
        (lambda: models.real_nvp(4).bounds(Box(-1, 1), latent=Box(-1, 1)), "not both"),
        (lambda: Flow(torch.nn.Linear(2, 2)), "expected a Bijection"),
        (lambda: Flow(models.real_nvp(2), "cauchy"), "expected 'normal' or a torch.distributions"),
        (lambda: Flow(blocks.Permutation.reverse(2)).sample(2), r"Flow\(bijection, shape=\(2,\)\)"),
        (lambda: Flow(models.real_nvp(2)).sample(0), "expected 1 or more"),
        (lambda: blocks.FactorOut(Squeeze(), (1, 2, 2)), "some channels must remain"),
        (lambda: blocks.Logit(0.6), r"\[0, 0.5\)"),
        (lambda: Invert(3), "expected a Bijection"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_blocks_that_are_replaced_or_added_later_count():
    """The log-determinant of a chain inside another one was left out where its blocks had none when it was built."""
    inner = Chain(*(blocks.AdditiveCoupling(MLP(2, 2)) for _ in range(2)))
    outer, x = Chain(inner, blocks.Permutation.reverse(4), shape=(4,)), torch.randn(3, 4)
    assert (outer.volume_preserving, outer.closed_form) == (True, True)
    inner.blocks[1] = blocks.DiagonalScaling(torch.tensor([2.0, 3.0, 4.0, 5.0]))
    inner.blocks.append(blocks.DiagonalScaling(torch.full((4,), 0.5)))
    expected = torch.full((3,), math.log(120 / 16))
    for f in (outer, Invert(Invert(outer)), Reversible(outer)):
        assert torch.allclose(f.forward_and_log_det(x)[1], expected)
        assert torch.allclose(f.inverse_and_log_det(x)[1], -expected)
    inner.blocks[0] = blocks.Residual(MLP(4, 4, lipschitz=0.5))
    assert not outer.closed_form
