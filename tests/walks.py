"""Gradients of networks whose walk drifts, and how far apart two are."""

import math

import torch

from bilip import models
from bilip.reversible import Guard, angle
from catalogue import squash

TOLERANCE = Guard().limit(torch.float32)


def loss_of(f, x):
    z, log_det = f.forward_and_log_det(x)
    return (z.flatten(1).square().sum(1) / 2 - log_det).mean()


def gradient(f, model, x, loss=loss_of):
    found = torch.autograd.grad(loss(f, x), list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def off(found, stored):
    value = angle(found, stored)
    return value if math.isfinite(value) else math.inf


def planted(sigma, places=(3,), features=8, count=8):
    torch.manual_seed(0)
    model = models.real_nvp(features, blocks=count, hidden=(16,))
    for k in places:
        squash(model[k], sigma)
    return model, torch.randn(16, features)
