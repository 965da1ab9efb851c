"""The monitor: what a row holds, and that training does not notice it."""

import csv
import math

import pytest
import torch
from torch import nn

from bilip import Chain, blocks, models
from bilip.auditing.probes import Spectrum
from bilip.errors import InputError
from bilip.reversible import Reversible
from bilip.training.monitor import StabilityMonitor, StabilityRow

pytestmark = pytest.mark.numeric


def test_rows_follow_the_model_as_it_changes():
    block = blocks.DiagonalScaling(torch.tensor([2.0, 0.5]))
    model, x = Chain(block, shape=(2,)), torch.randn(16, 2)
    monitor = StabilityMonitor(model, x, every=5)
    for step in range(11):
        assert (monitor(step) is None) == bool(step % 5)
        with torch.no_grad():
            for p in block.parameters():
                p.mul_(1.1)
    conditions = [row.condition for row in monitor.rows]
    assert [row.step for row in monitor.rows] == [0, 5, 10]
    assert len(set(conditions)) == 3
    assert conditions[0] == pytest.approx(4)
    assert monitor.measure(11).condition == pytest.approx(Spectrum(1).measure(model, x)["condition"])


def test_an_exploding_inverse_shows():
    model = models.real_nvp(4, blocks=4, scale="exp")
    with torch.no_grad():
        last = [m for m in model[1].modules() if isinstance(m, nn.Linear)][-1]
        last.bias[2:] = -60.0
    row = StabilityMonitor(model, torch.randn(16, 4)).measure(0)
    assert row.relative_max > 1 or row.share_non_finite > 0
    assert row.sigma_min < 1e-20


def test_training_does_not_notice():
    """Two runs from the same seed, one watched: bit for bit the same parameters, statistics and random numbers."""

    def train(watched):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
        model = Chain(blocks.ActNorm(4), blocks.AffineCoupling(net), shape=(4,))
        x = torch.randn(64, 4)
        monitor = StabilityMonitor(model, x, every=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(4):
            if watched:
                monitor(step)  # step 0: the ActNorm has seen nothing yet
            model(x).square().mean().backward()
            if watched:
                monitor(step)
            optimizer.step()
            optimizer.zero_grad()
        assert model.training
        assert net[1].training
        return [*model.state_dict().values(), torch.rand(3)], monitor.rows

    plain, _ = train(watched=False)
    watched, rows = train(watched=True)
    assert all(map(torch.equal, plain, watched))
    assert math.isnan(rows[0].relative_max)
    assert math.isnan(rows[0].share_non_finite)
    assert rows[-1].relative_max < 1e-4
    assert rows[-1].condition >= 1


@pytest.mark.parametrize("inside", ["reversible", "classifier"])
def test_the_guards_report_is_in_the_row(inside):
    walk = Reversible(models.real_nvp(4, blocks=4))
    model = walk if inside == "reversible" else models.classifier(walk, classes=2)
    x = torch.randn(16, 4)
    monitor = StabilityMonitor(model, x, spectrum=False)
    assert math.isnan(monitor.measure(0).drift)  # nothing watched yet
    walk(x).square().sum().backward()
    row = monitor.measure(0)
    assert 0 <= row.drift < 1e-5
    assert row.repaired == 0
    assert math.isnan(row.condition)
    assert row.seconds > 0
    assert walk.report().steps == 1


def test_csv(tmp_path):
    monitor = StabilityMonitor(models.real_nvp(4, blocks=2), torch.randn(16, 4), every=2)
    for step in range(4):
        monitor(step)
    monitor.to_csv(tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(StabilityRow.__dataclass_fields__)
    assert float(rows[1]["condition"]) == monitor.rows[1].condition
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]
    with pytest.raises(InputError, match="cannot write"):
        monitor.to_csv(tmp_path / "missing" / "rows.csv")


def test_beyond_the_exact_dimensions_and_bad_arguments():
    model, x = models.glow((3, 8, 8), levels=1, blocks=1, hidden=8), torch.randn(8, 3, 8, 8)
    model(x)
    row = StabilityMonitor(model, x, samples=4, steps=8).measure(0)
    assert 0 < row.sigma_min < row.sigma_max
    with pytest.raises(InputError, match="every=0"):
        StabilityMonitor(model, x, every=0)


def test_the_names_that_it_had_among_the_probes():
    from bilip.probes.monitor import StabilityMonitor as by_module

    import bilip.auditing.probes

    assert by_module is bilip.probes.StabilityMonitor is bilip.auditing.probes.StabilityMonitor is StabilityMonitor
    assert bilip.probes.StabilityRow is bilip.auditing.probes.StabilityRow is StabilityRow
    assert "StabilityMonitor" in bilip.probes.__all__
