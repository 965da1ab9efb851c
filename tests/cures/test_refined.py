"""A refined inverse helps where its own error dominates, and is skipped where the rounding of the latent does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import bilip
from bilip.auditing.budget import BUDGETS
from bilip.blocks import Bijection
from bilip.cures.arithmetic import DOMINATES, Refined
from cures.exploded import bilip_flow

BUDGET = replace(BUDGETS["quick"], samples=256, noise=256, draws=256, batch=128, bad_share=0.04, log_dets=1)


class Sloppy(Bijection):
    """x + sin(x) / 2 + w, with an inverse that stops after three steps of its fixed point: off by about 1e-2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x + torch.sin(x) / 2 + self.w

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        x = z
        for _ in range(3):
            x = z - self.w - torch.sin(x) / 2
        return x

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), torch.log1p(torch.cos(x) / 2).sum(1)


def errors(model: Bijection, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (model.inverse(model(x)).double() - x.double()).norm(dim=1)


def points(width: int) -> Tensor:
    return torch.randn(256, width, generator=torch.Generator().manual_seed(3))


def test_it_helps_where_the_inverse_itself_is_off():
    model, x = Sloppy(), points(3)
    assert float(errors(model, x).max()) > 1e-3
    assert float(errors(Refined(model), x).max()) < 1e-5
    result = bilip.cure(model, x, uses=["inversion"], rungs=["arithmetic"], budget=BUDGET)
    assert result.status == "cured", str(result)
    assert result.chosen is not None
    assert "refined" in result.chosen.settings


def test_it_is_skipped_where_the_latent_is_too_short_and_would_not_help():
    torch.manual_seed(0)
    flow, x = bilip_flow(-4.0), points(4)
    result = bilip.cure(flow, x, uses=["inversion"], rungs=["arithmetic"], all_rungs=True, budget=BUDGET)
    assert not any("refined" in attempt.settings for attempt in result.tried)
    # the theory, tried all the same: a latent of float32 does not know more about x
    plain, refined = errors(flow.bijection, x), errors(Refined(flow.bijection), x)
    assert float(refined.median()) > 0.1 * float(plain.median()) > 1e-3


@pytest.mark.parametrize("width", [3, 80])
def test_large_dimensions_take_steps_without_a_jacobian(width):
    model = Sloppy()
    model.w = nn.Parameter(torch.zeros(width))
    x = points(width)
    assert float(errors(Refined(model, 40), x).max()) < 1e-4


def test_it_follows_its_parameters_and_is_not_stale():
    model = Refined(Sloppy())
    x = points(3)
    errors(model, x)
    with torch.no_grad():
        model.inner.w.add_(1.0)
    assert float(errors(model, x).max()) < 1e-5
    assert DOMINATES > 1
