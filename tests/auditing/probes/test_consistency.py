"""Is the model a function?"""

import math

import pytest
import torch
from torch import distributions, nn

from bilip import Bijection, Chain, Flow, blocks, models
from bilip.auditing.probes import Consistency

pytestmark = pytest.mark.numeric


class Scaled(Bijection):
    def forward(self, x, context=None):
        return 2 * x

    def inverse(self, z, context=None):
        return z / 2


class Stochastic(Scaled):
    def forward(self, x, context=None):
        return 2 * x + 1e-3 * torch.randn_like(x)


class Social(Scaled):
    def forward(self, x, context=None):
        return 2 * x + x.mean(0)


class Remembers(Scaled):
    last = None

    def forward(self, x, context=None):
        self.last = (2 * x, x)
        return 2 * x

    def inverse(self, z, context=None):
        return self.last[1] if self.last is not None and torch.equal(self.last[0], z) else z


FLAGS = ("stochastic", "batch_dependent", "cached")


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (Scaled, (False, False, False)),
        (Stochastic, (True, False, False)),
        (Social, (False, True, False)),
        (Remembers, (False, False, True)),
    ],
)
def test_each_defect_raises_its_own_flag(model, flags):
    m = Consistency().measure(model(), torch.randn(32, 3))
    assert tuple(m[flag] for flag in FLAGS) == flags


def test_rounding_is_no_defect():
    for model in (models.real_nvp(6, blocks=12), models.residual_flow(6, blocks=3)):
        m = Consistency().measure(model, torch.randn(64, 6))
        assert tuple(m[flag] for flag in FLAGS) == (False, False, False)


def test_a_model_that_cannot_be_copied_is_compared_in_its_own_dtype():
    class Only(Scaled):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is only one of me")

    m = Consistency().measure(Only(), torch.randn(32, 3))
    assert tuple(m[flag] for flag in FLAGS) == (False, False, False)
    assert "only one of me" in m.notes[0]


def test_modules_that_refuse_evaluation_mode_are_named():
    class Stubborn(nn.Dropout):
        def train(self, mode=True):
            self.training = True
            return self

    net = nn.Sequential(nn.Linear(2, 2), Stubborn(0.5))
    m = Consistency().measure(Chain(blocks.AdditiveCoupling(net), shape=(4,)).train(), torch.randn(32, 4))
    assert m["stochastic"]
    assert any("still in training mode" in note for note in m.notes)


def test_contexts_keep_their_samples():
    flow = models.real_nvp(4, blocks=2, context=3, scale="half_sigmoid")
    m = Consistency().measure(flow, (torch.randn(32, 4), torch.randn(32, 3)))
    assert tuple(m[flag] for flag in FLAGS) == (False, False, False)
    assert m["around_error"] < 1e-9


class Loose(distributions.Normal):
    """Draws are not those of the density, or a factor is missing, in each dimension."""

    def __init__(self, temperature=1.0, missing=0.0):
        super().__init__(torch.zeros(4), torch.ones(4))
        self.temperature, self.missing = temperature, missing

    def sample(self, sample_shape=()):
        return self.temperature * super().sample(sample_shape)

    def log_prob(self, value):
        return super().log_prob(value) + self.missing


ONES = torch.ones(4)
MIXTURE = distributions.MixtureSameFamily(
    distributions.Categorical(torch.tensor([0.1, 0.9])),
    distributions.Independent(distributions.Normal(torch.tensor([[-9.0] * 4, [0.0] * 4]), torch.ones(2, 4)), 1),
)


@pytest.mark.parametrize(
    ("base", "wrong"),
    [
        (Loose(), False),
        ("normal", False),
        (MIXTURE, False),
        (distributions.StudentT(3 * ONES), False),
        (distributions.Uniform(-ONES, ONES), False),
        (Loose(temperature=0.6), True),
        (Loose(temperature=1.5), True),
        (Loose(missing=math.log(2 * math.pi) / 2), True),
        (Loose(missing=-0.5), True),
    ],
)
def test_a_base_whose_density_is_not_that_of_its_draws(base, wrong):
    torch.manual_seed(0)
    m = Consistency().measure(Flow(blocks.Permutation.reverse(4), base, shape=(4,)), torch.randn(32, 4))
    assert m["base_wrong"] == wrong
