"""What an audit at `quick` costs, in samples sent through the model: a clock would say how busy the machine is."""

import copy
from collections import Counter

import pytest
import torch

import bilip


class Counting(bilip.Bijection):
    """A model that counts the samples it is given, by dtype."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, Counter()

    def __deepcopy__(self, memo):
        twin = Counting(copy.deepcopy(self.inner, memo))
        twin.rows = self.rows  # the float64 copy's samples are counted too
        return twin

    def _count(self, x):
        self.rows[x.dtype] += len(x)

    def forward(self, x, context=None):
        self._count(x)
        return self.inner(x, context)

    def inverse(self, z, context=None):
        self._count(z)
        return self.inner.inverse(z, context)

    def forward_and_log_det(self, x, context=None):
        self._count(x)
        return self.inner.forward_and_log_det(x, context)

    def inverse_and_log_det(self, z, context=None):
        self._count(z)
        return self.inner.inverse_and_log_det(z, context)


NEEDED = 640  # samples that exclude a share of 1 % when none of them is bad
PROBES = ["consistency", "reconstruction", "likelihood", "log_det", "sampling", "precision"]


def spent(size, samples):
    torch.manual_seed(0)
    model = Counting(bilip.models.real_nvp(size, blocks=2, hidden=(16,), coupling="additive"))
    x = torch.randn(samples, size, generator=torch.Generator().manual_seed(1))
    flow = bilip.Flow(model, shape=(size,))
    record = bilip.audit(flow, x, ood=["uniform", "gaussian"], budget="quick", probes=PROBES)
    for use in ("inversion", "sampling", "likelihood", "ood-likelihood"):
        assert record.verdicts[use].status.value == "safe"
    return model.rows


@pytest.mark.parametrize("samples", [2_000, 20_000])
def test_a_sound_flow_costs_a_few_passes_over_what_the_allowed_share_needs(samples):
    rows = spent(8, samples)
    assert (
        rows[torch.float32] <= 30 * NEEDED
    )  # three sources, there and back, log p, samples, draws of the log-determinant
    jacobians = 3 * 256 * 8  # at 256 points of each source, for one opaque block
    assert rows[torch.float64] <= 10 * NEEDED + jacobians


def test_a_large_sound_flow_gets_few_references_in_float64():
    rows = spent(192, 2_000)
    assert rows[torch.float32] <= 30 * NEEDED
    jacobians = 3 * 2 * 2 * 192  # products at two points of each source, for two blocks
    assert (
        rows[torch.float64] <= 4 * NEEDED + 512 + jacobians
    )  # log p of every sample, since the nets are small, and a part of the draws; all of them would be 6 * NEEDED and more


def test_norms_of_nets_are_computed_once_for_all_sources(monkeypatch):
    from bilip.nets import certify

    calls, compute = Counter(), certify._log_lipschitz

    def counted(net, shape, outputs):
        calls[id(net), shape, str(outputs)] += 1
        return compute(net, shape, outputs)

    monkeypatch.setattr(certify, "_log_lipschitz", counted)
    model = bilip.models.real_nvp(4, blocks=2, hidden=(8,))
    record = bilip.audit(model, torch.randn(64, 4), ood=["uniform"], budget="quick", probes=["bounds"])
    assert [m.measured for m in record.measurements] == [True, True]
    assert calls
    assert max(calls.values()) == 1


def test_a_log_density_that_draws_nothing_is_not_asked_twice_on_a_whole_batch():
    torch.manual_seed(0)
    model = Counting(bilip.models.real_nvp(192, blocks=2, hidden=(16,), coupling="additive"))
    x = torch.randn(2_000, 192, generator=torch.Generator().manual_seed(1))
    bilip.audit(bilip.Flow(model, shape=(192,)), x, budget="quick", probes=["likelihood"])
    assert model.rows[torch.float32] <= 2 * NEEDED + 128  # once as it is, once with its input rounded anew
