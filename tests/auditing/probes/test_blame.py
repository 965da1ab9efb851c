"""Naming the block."""

import math

import pytest
import torch

import bilip
from bilip import Chain, blocks
from bilip.auditing.probes import Blame
from catalogue import Map, zeros

pytestmark = pytest.mark.numeric


class Shift(Map):
    def __init__(self):
        super().__init__(lambda x: x + 1, lambda z: z - 1, zeros, zeros)


class Forward(Shift):
    def forward(self, x, context=None):
        return torch.where(x[:, :1] > 0, torch.nan, x + 1)


class Backward(Shift):
    def inverse(self, z, context=None):
        return torch.where(z[:, :1] > 0, torch.inf, z - 1)


class Raises(Shift):
    def inverse(self, z, context=None):
        raise RuntimeError("no inverse here")


def chain(defect, place, count=6):
    return Chain(*(defect() if k == place else Shift() for k in range(count)), shape=(3,))


@pytest.mark.parametrize("defect", [Forward, Backward, Raises])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_first_block_that_is_not_finite_is_named(defect, place):
    m = Blame().measure(chain(defect, place), torch.ones(8, 3))
    assert m["first_non_finite"] == str(place)
    assert m["guilty"] == str(place)
    assert m["guilty_kind"] == defect.__name__
    assert m["wrong"] == 8


def test_nobody_is_blamed_for_nothing():
    m = Blame().measure(chain(Shift, 0), torch.ones(8, 3))
    assert (m["guilty"], m["first_non_finite"], m["why"], m["guilty_log_det"], m["wrong"]) == ("", "", "", "", 0)
    assert [row["block"] for row in m.rows] == list("012345")
    assert {row["kind"] for row in m.rows} == {"Shift"}


def test_extremes_of_each_block():
    scales = torch.tensor([4.0, 0.5, 1.0])
    m = Blame().measure(Chain(Shift(), blocks.DiagonalScaling(scales), shape=(3,)), torch.randn(8, 3))
    assert (m.rows[1]["sigma_max"], m.rows[1]["sigma_min"], m.rows[1]["condition"]) == pytest.approx((4.0, 0.5, 8.0))
    assert (m.rows[0]["sigma_max"], m.rows[0]["sigma_min"]) == pytest.approx((1.0, 1.0))
    assert m.rows[1]["log_det_error"] < 1e-6
    m = Blame(spectra=0).measure(Chain(Shift(), shape=(3,)), torch.randn(8, 3))
    assert math.isnan(m.rows[0]["sigma_max"])


def test_the_block_whose_log_determinant_is_false():
    class Liar(Shift):
        def forward_and_log_det(self, x, context=None):
            return self(x), x.new_ones(len(x))

    m = Blame().measure(chain(Liar, 4), torch.ones(8, 3))
    assert m["guilty_log_det"] == m["guilty"] == "4"
    assert m.rows[4]["log_det_error"] == pytest.approx(1.0)


# ---- inside composites of other libraries


def test_the_part_of_a_graph_with_split_and_concat_is_named():
    pytest.importorskip("FrEIA")
    import FrEIA.framework as ff
    import FrEIA.modules as fm

    class Squash(fm.InvertibleModule):
        """x / 1e6 + 1: five digits are lost, and the inverse makes that 1e6 times as large."""

        def forward(self, x_or_z, c=None, rev=False, jac=True):
            x = x_or_z[0]
            return ((x - 1) * 1e6 if rev else x * 1e-6 + 1,), 0.0

        def output_dims(self, input_dims):
            return input_dims

    def net(n_in, n_out):
        return torch.nn.Linear(n_in, n_out)

    torch.manual_seed(0)
    data = ff.InputNode(4, name="data")
    split = ff.Node(data, fm.Split, {"section_sizes": (2, 2), "dim": 0}, name="split")
    left = ff.Node(split.out0, Squash, {}, name="squash")
    right = ff.Node(split.out1, fm.NICECouplingBlock, {"subnet_constructor": net}, name="right")
    joined = ff.Node([left.out0, right.out0], fm.Concat, {"dim": 0}, name="joined")
    last = ff.Node(joined, fm.NICECouplingBlock, {"subnet_constructor": net}, name="last")
    model = ff.GraphINN([data, split, left, right, joined, last, ff.OutputNode(last, name="out")]).eval()
    m = Blame().measure(model, torch.randn(32, 4))
    assert m["wrong"] == 32
    assert m["guilty_kind"] == "Squash"
    assert "GraphINN" in m["why"]
    assert "forward" not in vars(next(part for part in model.modules() if isinstance(part, Squash)))  # nothing stays


def test_the_part_of_a_multi_scale_flow_is_named():
    nf = pytest.importorskip("normflows")

    class Squash(nf.flows.Flow):
        def forward(self, z):
            return (z - 1) * 1e6, z.new_zeros(len(z))

        def inverse(self, x):
            return x * 1e-6 + 1, x.new_zeros(len(x))

    torch.manual_seed(0)
    flows = [[Squash(), nf.flows.Squeeze()], [nf.flows.Permute(4), nf.flows.Squeeze()]]
    bases = [nf.distributions.DiagGaussian(shape, trainable=False) for shape in ((16, 1, 1), (2, 2, 2))]
    model = nf.MultiscaleFlow(bases, flows, [nf.flows.Merge()], class_cond=False).eval()
    m = Blame(spectra=0).measure(model, torch.randn(16, 1, 4, 4))
    assert m["guilty_kind"] == "Squash", (m["why"], m.rows)


def squashing(base):
    """A transform of a library whose inverse makes an error 1e6 times as large."""

    class Squash(base):
        domain = codomain = torch.distributions.constraints.real_vector
        bijective = True

        def _call(self, x):
            return x * 1e-6 + 1

        def _inverse(self, y):
            return (y - 1) * 1e6

        def log_abs_det_jacobian(self, x, y):
            return x.new_full(x.shape[:-1], x.shape[-1] * math.log(1e-6))

        def call_and_ladj(self, x):
            y = self._call(x)
            return y, self.log_abs_det_jacobian(x, y)

    return Squash


def test_the_part_of_a_multi_scale_transform_of_nflows_is_named():
    transforms = pytest.importorskip("nflows.transforms")

    class Squash(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs * 1e-6 + 1, inputs.new_zeros(len(inputs))

        def inverse(self, inputs, context=None):
            return (inputs - 1) * 1e6, inputs.new_zeros(len(inputs))

    torch.manual_seed(0)
    model = transforms.MultiscaleCompositeTransform(2)
    shape = model.add_transform(Squash(), (4, 2, 2))
    model.add_transform(transforms.OneByOneConvolution(2), shape)
    m = Blame(spectra=0).measure(model.eval(), torch.randn(16, 4, 2, 2))
    assert m["guilty_kind"] == "Squash", (m["why"], m.rows)


@pytest.mark.parametrize("nested", [False, True])
def test_the_part_of_a_transform_that_zuko_builds_at_each_call_is_named(nested):
    zuko = pytest.importorskip("zuko")
    squash = squashing(torch.distributions.Transform)

    def build(scale):
        parts = [zuko.transforms.PermutationTransform(torch.tensor([2, 0, 1])), squash()]
        last = zuko.transforms.MonotonicAffineTransform(torch.zeros(3), scale)
        inner = zuko.transforms.ComposedTransform(*parts)
        whole = [inner, last] if nested else [*parts, last]
        return zuko.transforms.ComposedTransform(*whole)

    model = zuko.lazy.UnconditionalTransform(build, torch.zeros(3))
    m = Blame(spectra=0).measure(model, torch.randn(16, 3))
    assert m["wrong"] == 16
    assert m["guilty_kind"] == "Squash", (m["why"], m.rows)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("nested", [False, True])
def test_the_part_of_a_transform_of_pyro_that_holds_others_is_named(nested):
    pytest.importorskip("pyro")
    from pyro.distributions import transforms as ts
    from pyro.distributions.torch_transform import TransformModule
    from torch.distributions import ComposeTransform

    squash = squashing(TransformModule)

    class Both(TransformModule):
        """A composite of a user's own: its parts are in lists and attributes, its map in code."""

        domain = codomain = torch.distributions.constraints.real_vector
        bijective = True

        def __init__(self):
            super().__init__()
            parts = [ts.Permute(torch.tensor([2, 0, 1])), squash()]
            self.first = ComposeTransform(parts) if nested else parts[0]
            self.second = ts.Permute(torch.tensor([1, 2, 0])) if nested else parts[1]

        def _call(self, x):
            return self.second(self.first(x))

        def _inverse(self, y):
            return self.first.inv(self.second.inv(y))

        def log_abs_det_jacobian(self, x, y):
            return x.new_full(x.shape[:-1], 3 * math.log(1e-6))

    model = Both()
    m = Blame(spectra=0).measure(model, torch.randn(16, 3))
    assert m["wrong"] == 16
    assert m["guilty_kind"] == "Squash", (m["why"], m.rows)
    assert "_call" not in vars(model.second)


def test_parts_of_nested_compositions_of_pyro_and_zuko_are_blocks_of_their_own():
    zuko = pytest.importorskip("zuko")
    pytest.importorskip("pyro")
    from pyro.distributions import transforms as ts
    from torch.distributions import ComposeTransform

    parts = [squashing(torch.distributions.Transform)(), ts.Permute(torch.tensor([2, 0, 1]))]
    module = ts.ComposeTransformModule([ts.affine_coupling(3, hidden_dims=[4])])
    models = [ComposeTransform([ComposeTransform(parts), module])]
    built = [zuko.lazy.UnconditionalTransform(squashing(torch.distributions.Transform))]
    built.append(
        zuko.lazy.UnconditionalTransform(zuko.transforms.PermutationTransform, torch.tensor([1, 2, 0]), buffer=True)
    )
    inner = zuko.lazy.LazyComposedTransform(*built)
    models.append(zuko.lazy.LazyComposedTransform(inner, zuko.flows.MAF(3, transforms=1).transform))
    for model in models:
        m = Blame(spectra=0).measure(model, torch.randn(16, 3))
        assert m["guilty_kind"] == "Squash", (m["why"], [(r["block"], r["kind"], r["gain"]) for r in m.rows])


def test_a_reversible_model_shows_its_blocks_to_an_audit():
    record = bilip.audit(
        bilip.Reversible(bilip.models.real_nvp(4, blocks=5)), torch.randn(64, 4), budget="quick", probes=["blame"]
    )
    assert len(record.find("blame")[0].rows) == 5
