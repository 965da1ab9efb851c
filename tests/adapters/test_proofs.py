"""Proven bounds of foreign blocks: the native block computes the same function, and no gain found exceeds the bound."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions.transforms import AffineTransform

from adapters import zoo
from bilip.adapters import as_bijection
from bilip.adapters._proofs import AtanExpScale, SoftclipExpScale
from bilip.bounds import Box
from bilip.errors import NoGlobalBound, NonFiniteParameters, UnknownLipschitz
from bilip.nets import MLP, Declared
from bilip.testing import search_gains


def nflows_coupling(kind, library="nflows.transforms"):
    transforms = pytest.importorskip(library)
    return getattr(transforms, kind)([1, 0, 1, 0, 0], lambda i, o: MLP(i, o, hidden=(8,), activation="tanh"))


def nflows_residual(kind, **options):
    transforms = pytest.importorskip("nflows.transforms")
    nets = pytest.importorskip("nflows.nn.nets")

    def net(inputs, outputs):
        made = nets.ResidualNet(inputs, outputs, 8, num_blocks=1, **options)
        nn.init.normal_(made.blocks[0].linear_layers[1].weight, std=0.3)
        return made

    return getattr(transforms, kind)([1, 0, 1, 0, 0], net)


def freia(kind, **options):
    modules = pytest.importorskip("FrEIA.modules")
    return getattr(modules, kind)([(5,)], subnet_constructor=zoo.net, **options)


def freia_images():
    modules = pytest.importorskip("FrEIA.modules")
    return modules.GLOWCouplingBlock([(2, 3, 3)], subnet_constructor=zoo.conv)


def normflows_coupling(**options):
    normflows = pytest.importorskip("normflows")
    outputs = 2 if options.get("scale", True) else 1
    split = options.get("split_mode", "channel")
    kept = 3 if split == "channel" else 2
    net = normflows.nets.MLP([kept, 8, outputs * (5 - kept)], leaky=0.1)
    return normflows.flows.AffineCouplingBlock(net, **options)


def zuko_coupling():
    zuko = pytest.importorskip("zuko")
    return zuko.flows.coupling.GeneralCouplingTransform(5, hidden_features=(8,), activation=nn.Tanh)


def zuko_permutation():
    zuko = pytest.importorskip("zuko")
    return zuko.lazy.UnconditionalTransform(zuko.transforms.PermutationTransform, torch.randperm(5), buffer=True)


def torch_affine(shape=(5,)):
    from torch.distributions.transforms import AffineTransform

    return AffineTransform(torch.randn(shape), torch.randn(shape))


PROVEN = {
    "nflows additive": lambda: nflows_coupling("AdditiveCouplingTransform"),
    "nflows affine": lambda: nflows_coupling("AffineCouplingTransform"),
    "nflows additive residual": lambda: nflows_residual("AdditiveCouplingTransform", activation=torch.tanh),
    "nflows affine residual": lambda: nflows_residual("AffineCouplingTransform"),
    "nflows permutation": lambda: pytest.importorskip("nflows.transforms").RandomPermutation(5),
    "glasflow affine": lambda: nflows_coupling("AffineCouplingTransform", "glasflow.nflows.transforms.coupling"),
    "FrEIA NICE": lambda: freia("NICECouplingBlock"),
    "FrEIA NICE uneven": lambda: freia("NICECouplingBlock", split_len=1),
    "FrEIA GLOW": lambda: freia("GLOWCouplingBlock"),
    "FrEIA GLOW tanh": lambda: freia("GLOWCouplingBlock", clamp_activation="TANH", clamp=1.3),
    "FrEIA GLOW sigmoid": lambda: freia("GLOWCouplingBlock", clamp_activation="SIGMOID"),
    "FrEIA RNVP": lambda: freia("RNVPCouplingBlock", clamp=3.0),
    "FrEIA RNVP sigmoid": lambda: freia("RNVPCouplingBlock", clamp_activation="SIGMOID"),
    "FrEIA images": freia_images,
    "FrEIA permutation": lambda: pytest.importorskip("FrEIA.modules").PermuteRandom([(5,)], seed=0),
    "normflows exp": lambda: normflows_coupling(),
    "normflows sigmoid": lambda: normflows_coupling(scale_map="sigmoid"),
    "normflows sigmoid_inv": lambda: normflows_coupling(scale_map="sigmoid_inv"),
    "normflows additive": lambda: normflows_coupling(scale=False),
    "normflows swapped": lambda: normflows_coupling(split_mode="channel_inv"),
    "normflows shuffle": lambda: pytest.importorskip("normflows").flows.Permute(5, mode="shuffle"),
    "normflows swap": lambda: pytest.importorskip("normflows").flows.Permute(5, mode="swap"),
    "zuko coupling": zuko_coupling,
    "zuko inverse": lambda: zuko_coupling().inv,
    "zuko permutation": zuko_permutation,
    "torch affine": torch_affine,
    "torch affine inverse": lambda: torch_affine().inv,
    "pyro permutation": lambda: pytest.importorskip("pyro.distributions.transforms").Permute(torch.randperm(5)),
    "memcnn additive": lambda: pytest.importorskip("memcnn") and zoo.memcnn_stack()[0],
}


@pytest.fixture(params=PROVEN.values(), ids=PROVEN.keys())
def block(request):
    made = request.param()
    block = as_bijection(made)
    with torch.no_grad():
        for p in block.parameters():
            if p.is_floating_point():
                p.mul_(1.5)
    return block


def shape_of(block):
    return (2, 3, 3) if block.shape == (2, 3, 3) else (4,) if block.library == "memcnn" else (5,)


def test_the_native_block_computes_the_same(block):
    mine, native = (copy.deepcopy(f).double().eval() for f in (block, block.native()))
    x = torch.randn(6, *shape_of(block), dtype=torch.float64)
    assert torch.allclose(mine(x), native(x), rtol=1e-9, atol=1e-9)
    assert torch.allclose(mine.inverse(x), native.inverse(x), rtol=1e-9, atol=1e-9)
    if block.has_log_det:
        assert torch.allclose(mine.forward_and_log_det(x)[1], native.forward_and_log_det(x)[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("formula", ["sharp", "paper"])
def test_no_gain_exceeds_the_bound(block, formula):
    box = Box(-2, 3, shape=shape_of(block))
    gains = search_gains(block, box, points=8, steps=8)
    bound = block.bounds(box, formula=formula)
    assert gains.forward <= bound.forward * (1 + 1e-9)
    assert gains.inverse <= bound.inverse * (1 + 1e-9)
    assert math.isfinite(bound.inverse)
    assert bound.blocks[0].kind == block.kind
    twin = copy.deepcopy(block).double().eval()
    with torch.no_grad():
        image = twin(box.sample(64))
        assert block.enclose(box).contains(image).all()
        hull = Box(image.amin(0), image.amax(0))
        assert block.enclose_inverse(hull).contains(twin.inverse(hull.sample(64))).all()


def test_a_chain_of_foreign_blocks_is_proved_block_by_block():
    pytest.importorskip("FrEIA")
    inn = zoo.freia_sequence()
    inn.module_list = inn.module_list[:4]
    inn.conditions, inn.shapes = inn.conditions[:4], inn.shapes[:5]
    chain = as_bijection(inn)
    bound = chain.bounds(Box(-1, 1))
    assert [row.kind for row in bound.blocks] == [block.kind for block in chain]
    gains = search_gains(chain, Box(-1, 1, shape=(4,)), points=8, steps=8)
    assert gains.forward <= bound.forward
    assert gains.inverse <= bound.inverse
    with pytest.raises(NoGlobalBound):
        chain.bounds()
    assert math.isfinite(chain[3].bounds().inverse), "additive coupling has a global bound"


def conditional_freia():
    return pytest.importorskip("FrEIA.modules").GLOWCouplingBlock([(4,)], dims_c=[(2,)], subnet_constructor=zoo.net)


def conditional_zuko():
    coupling = pytest.importorskip("zuko").flows.coupling
    return coupling.GeneralCouplingTransform(4, 2, hidden_features=(8,), activation=nn.Tanh)


@pytest.mark.parametrize("make", [conditional_freia, conditional_zuko])
def test_conditions_take_part_in_the_proof(make):
    block = as_bijection(make())
    box, given = Box(-1, 1, shape=(4,)), Box(-1, 1, shape=(2,))
    bound = block.bounds(box, context=given)
    with pytest.raises(NoGlobalBound):
        block.bounds()
    drawn = [given.sample(1, generator=torch.Generator().manual_seed(seed))[0] for seed in range(3)]
    for seed, context in enumerate([*drawn, torch.ones(2)]):
        gains = search_gains(block, box, context=context, points=6, steps=5, seed=seed)
        assert gains.forward <= bound.forward
        assert gains.inverse <= bound.inverse


def lu_linear():
    return pytest.importorskip("nflows.transforms").LULinear(5)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.distributions.transforms.ExpTransform, "ExpTransform of torch"),
        (lu_linear, None),
        (lambda: nflows_residual("AdditiveCouplingTransform", use_batch_norm=True), "batch"),
        (lambda: nflows_residual("AdditiveCouplingTransform", dropout_probability=0.5), "dropout"),
        (lambda: nflows_residual("AdditiveCouplingTransform", activation=torch.exp), "exp"),
        (lambda: freia("GLOWCouplingBlock", clamp_activation=torch.sin), "clamp_activation"),
        (lambda: freia("GLOWCouplingBlock", clamp=0.0), "clamp"),
        (lambda: freia("GLOWCouplingBlock", clamp=-1.0), "clamp"),
    ],
)
def test_nothing_is_guessed(make, why):
    block = as_bijection(make())
    with pytest.raises(UnknownLipschitz, match=why):
        block.bounds(Box(-1, 1, shape=(5,)))


@pytest.mark.parametrize("box", [None, Box(-1, 1, shape=(2,))])
@pytest.mark.parametrize(("loc", "scale"), [(math.nan, 2.0), (math.inf, 2.0), (0.0, math.inf), (0.0, math.nan)])
def test_numbers_that_are_not_finite_are_refused_as_tensors_are(loc, scale, box):
    block = as_bijection(AffineTransform(loc, scale))
    with pytest.raises(NonFiniteParameters):
        block.bounds(box)


def foreign_object(block):
    """What the library made."""
    return block.module.object() if hasattr(block.module, "object") else block.module


def hook(target):
    if not isinstance(target, nn.Module):
        pytest.skip("no module, so it has no hooks")
    target.register_forward_hook(lambda module, given, out: None)


def hook_inside(target):
    inner = [part for part in target.modules() if part is not target] if isinstance(target, nn.Module) else []
    if not inner:
        pytest.skip("nothing inside")
    inner[-1].register_forward_pre_hook(lambda module, given: None)


def patch(target):
    name = "forward" if isinstance(target, nn.Module) and "forward" in dir(type(target)) else "_call"
    target.__dict__[name] = lambda *given, **options: 100 * given[0]


def patch_inverse(target):
    name = next(name for name in ("inverse", "_inverse", "_call_impl") if hasattr(type(target), name))
    target.__dict__[name] = lambda *given, **options: 100 * given[0]


def override(target):
    kind = type(target)
    target.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *given: given[0], "__module__": "mine"})


@pytest.mark.parametrize("change", [hook, hook_inside, patch, patch_inverse, override])
def test_a_changed_block_is_not_trusted(block, change):
    box = Box(-1, 1, shape=shape_of(block))
    assert block.bounds(box).log_forward < math.inf
    change(foreign_object(block))
    for ask in (lambda: block.bounds(box), lambda: block.bounds(latent=box), lambda: block.bounds()):
        with pytest.raises(UnknownLipschitz):
            ask()


def test_a_class_of_a_library_patched_by_somebody_is_not_trusted(monkeypatch):
    """Also without a box, where the block and its native block cannot be compared on points."""
    transforms = pytest.importorskip("nflows.transforms")
    block = as_bijection(nflows_coupling("AdditiveCouplingTransform"))
    assert block.bounds().forward < 10
    kind = transforms.AffineCouplingTransform  # of which the additive one is a subclass
    monkeypatch.setattr(kind, "_coupling_transform_forward", lambda self, x, p: (100 * x, x[:, 0]))
    with pytest.raises(UnknownLipschitz, match="method _coupling_transform_forward of its class AffineCoupling"):
        block.bounds()


def test_the_nets_inside_are_read_like_any_other():
    """In place behind an identity, patched, or of another class: a bound of the native block would be about something else."""
    pytest.importorskip("FrEIA")
    nets = []

    def net(inputs, outputs):
        nets.append(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(inputs, outputs)))
        return nets[-1]

    modules = pytest.importorskip("FrEIA.modules")
    block = as_bijection(modules.NICECouplingBlock([(4,)], subnet_constructor=net))
    assert block.bounds().forward < 100
    nets[0][1].inplace = True
    with pytest.raises(UnknownLipschitz, match="in place"):
        block.bounds()
    nets[0][1].inplace = False
    nets[1][1].forward = lambda x: 100 * x
    with pytest.raises(UnknownLipschitz, match="method forward replaced"):
        block.bounds()


def test_a_container_that_does_more_is_not_taken_apart():
    framework, modules = pytest.importorskip("FrEIA.framework"), pytest.importorskip("FrEIA.modules")

    class Scaled(framework.SequenceINN):
        def forward(self, x_or_z, c=None, rev=False, jac=True):
            given = tuple(part / 100 for part in x_or_z) if rev else x_or_z
            out, log_det = super().forward(given, c=c, rev=rev, jac=jac)
            return (out if rev else 100 * out), log_det

    model = Scaled(4)
    model.append(modules.NICECouplingBlock, subnet_constructor=zoo.net)
    block = as_bijection(model)
    x = torch.randn(3, 4)
    assert torch.equal(block(x), model((x,))[0])
    assert torch.allclose(block.inverse(block(x)), x, atol=1e-5)
    with pytest.raises(UnknownLipschitz):
        block.bounds()


def test_a_library_that_changed_its_formula_is_noticed():
    """Same class and attributes, another scale: the native block no longer agrees, so nothing is claimed."""
    transforms = pytest.importorskip("nflows.transforms")
    coupling = nflows_coupling("AffineCouplingTransform")
    block = as_bijection(coupling)
    assert math.isfinite(block.bounds(Box(-1, 1, shape=(5,))).forward)
    kind = type("AffineCouplingTransform", (transforms.AffineCouplingTransform,), {})
    kind.__module__ = "nflows.transforms.coupling"
    there = {"__name__": kind.__module__, "torch": torch}  # written in the library itself
    kind._scale_and_shift = eval("lambda self, p: (torch.exp(p[:, 2:]), p[:, :2])", there)
    coupling.__class__ = kind
    with pytest.raises(UnknownLipschitz, match="installed version"):
        block.bounds(Box(-1, 1, shape=(5,)))


def test_a_chosen_scale_is_not_the_default_one():
    coupling = pytest.importorskip("glasflow.nflows.transforms.coupling")
    kind = coupling.AffineCouplingTransform
    block = as_bijection(kind([1, 0], lambda i, o: MLP(i, o), scale_activation=kind.GENERAL_SCALE_ACTIVATION))
    with pytest.raises(UnknownLipschitz):
        block.bounds(Box(-1, 1, shape=(2,)))


def test_an_affine_transform_for_each_sample_has_no_bound():
    from torch.distributions.transforms import AffineTransform

    block = as_bijection(AffineTransform(torch.zeros(7, 2), torch.ones(7, 2)))
    with pytest.raises(UnknownLipschitz, match="shape"):
        block.log_lip(Box(-1, 1, shape=(2,)))


def test_a_declared_net_inside():
    transforms = pytest.importorskip("nflows.transforms")

    class Wave(nn.Module):
        def forward(self, x, context=None):
            return torch.sin(x)

    block = as_bijection(transforms.AdditiveCouplingTransform([0, 1], lambda i, o: Declared(Wave(), lipschitz=1.0)))
    assert block.bounds().inverse == pytest.approx((1 + 5**0.5) / 2)


@pytest.mark.parametrize("scale", [AtanExpScale(1.3), AtanExpScale(5.0), SoftclipExpScale(6.9), SoftclipExpScale(1.5)])
def test_scales_know_their_suprema(scale):
    s = torch.linspace(-60, 60, 400001, dtype=torch.float64)
    g, slope = scale(s), torch.autograd.functional.jvp(lambda v: scale(v), s, torch.ones_like(s))[1]
    back = torch.autograd.functional.jvp(lambda v: 1 / scale(v), s, torch.ones_like(s))[1]
    for low, high in ((-60.0, 60.0), (-1.0, 2.0), (0.5, 0.7), (-9.0, -3.0), (30.0, 31.0)):
        inside = (s >= low) & (s <= high)
        sup = scale.suprema(torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))
        for value, found in zip(sup, (g, slope.abs(), 1 / g, back.abs()), strict=True):
            best = math.log(float(found[inside].max()))
            assert best <= float(value) + 1e-12
            assert best == pytest.approx(float(value), abs=2e-3)  # the grid
    ends = scale.suprema(torch.tensor(-math.inf, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64))
    assert all(math.isfinite(float(v)) for v in ends)
    low, high = scale.enclose(Box(-3.0, 3.0)).low, scale.enclose(Box(-3.0, 3.0)).high
    assert float(low) <= float(scale(torch.tensor(-3.0))) <= float(high)


def test_a_residual_net_with_a_block_of_the_users_is_not_trusted():
    resnet = pytest.importorskip("nflows.nn.nets.resnet")

    class Loud(resnet.ResidualBlock):
        def forward(self, inputs, context=None):
            return 100 * inputs

    module = nflows_residual("AdditiveCouplingTransform", activation=torch.tanh)
    module.transform_net.blocks[0] = Loud(8, None)
    with pytest.raises(UnknownLipschitz, match="a block of the class"):
        as_bijection(module).bounds(Box(-1, 1, shape=(5,)))


def far_from_data(original):
    return lambda self, x: torch.where(x.abs() > 11, 100 * x, original(self, x))


def test_patched_transforms_of_torch_and_zuko_are_not_trusted(monkeypatch):
    """A change that the comparison at a few points would not meet."""
    from torch.distributions.transforms import AffineTransform

    monkeypatch.setattr(AffineTransform, "_call", far_from_data(AffineTransform._call))
    with pytest.raises(UnknownLipschitz, match="method _call of its class AffineTransform replaced"):
        as_bijection(torch_affine()).bounds(Box(-20, 20, shape=(5,)))
    univariate = pytest.importorskip("zuko").transforms.MonotonicAffineTransform
    monkeypatch.setattr(univariate, "_call", far_from_data(univariate._call))
    with pytest.raises(UnknownLipschitz, match="method _call of its class MonotonicAffineTransform replaced"):
        as_bijection(zuko_coupling()).bounds(Box(-20, 20, shape=(5,)))


@pytest.mark.parametrize(("name", "way_back"), [("FrEIA permutation", "perm_inv"), ("normflows shuffle", "perm")])
def test_a_way_back_that_is_no_inverse_is_not_trusted(name, way_back):
    """A buffer of the other direction was replaced: of what the model calls its inverse nothing is known."""
    module = PROVEN[name]()
    block = as_bijection(module)
    assert block.bounds(Box(-1, 1, shape=(5,))).inverse == pytest.approx(1)
    getattr(module, way_back).data = torch.zeros(5, dtype=torch.long)
    with pytest.raises(UnknownLipschitz, match="parts were changed"):
        block.bounds(Box(-1, 1, shape=(5,)))


def foreign_module_replaced():
    modules = pytest.importorskip("FrEIA.modules")
    block = as_bijection(modules.GLOWCouplingBlock([(4,)], subnet_constructor=zoo.net))
    block.module = modules.AllInOneBlock([(4,)], subnet_constructor=zoo.net)
    return block


def layer_inserted():
    coupling = pytest.importorskip("nflows.transforms.coupling")
    nets = pytest.importorskip("nflows.nn.nets")
    block = as_bijection(
        coupling.AffineCouplingTransform(
            [1, -1, 1, -1], lambda i, o: nets.ResidualNet(i, o, hidden_features=8, num_blocks=1)
        )
    )
    block.module.transform_net.blocks[0].linear_layers.insert(1, nn.Linear(8, 8))
    return block


def permutation_replaced():
    permutations = pytest.importorskip("nflows.transforms.permutations")
    block = as_bijection(permutations.ReversePermutation(4))
    block.module._permutation = torch.zeros(4, dtype=torch.long)
    return block


@pytest.mark.parametrize("make", [foreign_module_replaced, layer_inserted, permutation_replaced])
def test_what_cannot_be_rebuilt_from_its_parts_is_said(make):
    with pytest.raises(UnknownLipschitz, match="cannot be rebuilt from its parts") as caught:
        make().bounds(Box(-1, 1, shape=(4,)))
    assert "\n" not in str(caught.value)


def test_a_net_may_keep_what_it_computed():
    """A tensor with a graph, as of the last training step, cannot be copied."""
    block = nflows_coupling("AdditiveCouplingTransform")
    y = block(torch.randn(4, 5))[0]
    block.kept = y
    assert as_bijection(block).eval().bounds(Box(-1, 1, shape=(5,))).forward > 1
