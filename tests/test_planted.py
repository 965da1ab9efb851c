"""Planted defects: `audit` finds each of them, and names the block that holds it."""

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import bilip
from bilip import Bijection, Chain, blocks, nets

pytestmark = pytest.mark.numeric

GUILTY = 11


class Wrapped(Bijection):
    """A sound block to be spoilt by a subclass."""

    def __init__(self):
        super().__init__()
        self.inner = blocks.AffineCoupling(nets.MLP(4, 8, hidden=(16,)), scale="half_sigmoid")

    def forward(self, x, context=None):
        return self.inner(x)

    def inverse(self, z, context=None):
        return self.inner.inverse(z)

    def forward_and_log_det(self, x, context=None):
        return self(x), self.inner.forward_and_log_det(x)[1]

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), self.inner.inverse_and_log_det(z)[1]


class WrongSign(Wrapped):
    def forward_and_log_det(self, x, context=None):
        return self(x), -self.inner.forward_and_log_det(x)[1]


class WrongFactor(Wrapped):
    """Off in both directions, so that they still cancel: only the Jacobian tells."""

    def forward_and_log_det(self, x, context=None):
        return self(x), 1.1 * self.inner.forward_and_log_det(x)[1]

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), 1.1 * self.inner.inverse_and_log_det(z)[1]


class SlightlyOff(Wrapped):
    def inverse(self, z, context=None):
        return self.inner.inverse(z) * (1 + 1e-3)


class Drops(Wrapped):
    def inverse(self, z, context=None):
        x = self.inner.inverse(z)
        return torch.cat((x[:, :6], torch.zeros_like(x[:, 6:])), 1)


class Cached(Wrapped):
    """Remembers the last input; without it the inverse is wrong."""

    last: tuple | None = None

    def forward(self, x, context=None):
        z = self.inner(x)
        self.last = (z, x)
        return z

    def inverse(self, z, context=None):
        if self.last is not None and torch.equal(z, self.last[0]):
            return self.last[1]
        return z


class Stochastic(Wrapped):
    def forward(self, x, context=None):
        return self.inner(x) + 1e-2 * torch.randn_like(x)


class BatchStatistics(Wrapped):
    """BatchNorm left in training mode."""

    def forward(self, x, context=None):
        return self.inner(functional.batch_norm(x, None, None, training=True))


def chain(defect: type[Wrapped], place: int = GUILTY) -> Chain:
    parts: list[Bijection] = []
    for k in range(20):
        parts.append(defect() if k == place else Wrapped())
    for k in range(1, 20, 2):  # turn around between blocks, inside the same block count
        parts[k] = Turned(parts[k])
    return Chain(*parts, shape=(8,))


class Turned(Bijection):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, context=None):
        return self.inner(x.flip(1))

    def inverse(self, z, context=None):
        return self.inner.inverse(z).flip(1)

    def forward_and_log_det(self, x, context=None):
        return self.inner.forward_and_log_det(x.flip(1))

    def inverse_and_log_det(self, z, context=None):
        x, log_det = self.inner.inverse_and_log_det(z)
        return x.flip(1), log_det


def examine(model):
    return bilip.audit(
        bilip.Flow(model),
        torch.randn(256, 8),
        budget="quick",
        probes=["consistency", "reconstruction", "log_det", "blame", "sampling"],
    )


def test_the_sound_chain_is_safe():
    record = examine(chain(Wrapped))
    assert record.verdicts["likelihood"].status == record.verdicts["sampling"].status == "safe"
    assert record.find("blame")[0]["guilty"] == record.find("blame")[0]["guilty_log_det"] == ""


@pytest.mark.parametrize("defect", [WrongSign, WrongFactor, SlightlyOff, Drops, Cached, Stochastic, BatchStatistics])
@pytest.mark.parametrize("seed", range(2))
def test_planted_defect_is_found(defect, seed):
    torch.manual_seed(seed)
    record = examine(chain(defect))
    assert record.verdicts["likelihood"].status == "unsafe", record.verdicts["likelihood"]
    assert record.verdicts["likelihood"].remedy


@pytest.mark.parametrize("defect", [WrongSign, WrongFactor])
@pytest.mark.parametrize("place", [0, 11, 19])
def test_the_block_with_a_false_log_det_is_named(defect, place):
    blame = examine(chain(defect, place)).find("blame")[0]
    assert blame["guilty_log_det"] == str(place)
    assert blame["guilty"] == str(place)


@pytest.mark.parametrize("defect", [SlightlyOff, Drops, Stochastic, BatchStatistics])
@pytest.mark.parametrize("place", [0, 11, 19])
def test_the_block_with_a_false_inverse_is_named(defect, place):
    record = examine(chain(defect, place))
    assert record.find("blame")[0]["guilty"] == str(place)


def test_a_cache_is_called_one():
    for model in (chain(Cached, 19), Chain(Cached(), shape=(8,))):
        record = examine(model)
        assert record.find("consistency")[0]["cached"]
        assert "cache" in record.verdicts["likelihood"].reason


def test_noise_and_batch_statistics_are_called_by_name():
    assert record_flag(Stochastic) == (True, False)
    assert record_flag(BatchStatistics) == (False, True)


def record_flag(defect):
    m = examine(chain(defect)).find("consistency")[0]
    return m["stochastic"], m["batch_dependent"]


def test_training_mode_is_put_back():
    model = Chain(blocks.AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), shape=(8,))
    model.train()
    model.blocks[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    statistics = {k: v.clone() for k, v in model.state_dict().items()}
    examine(model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(v, statistics[k]) for k, v in model.state_dict().items())
