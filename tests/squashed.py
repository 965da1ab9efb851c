"""Affine couplings with near-zero scales: their inverses are lost."""

import math

import torch


def squash(block, sigma):
    """Move the raw scales of an affine coupling so far down that its scale is about sigma."""
    last = [layer for layer in block.t.modules() if getattr(layer, "bias", None) is not None][-1]
    with torch.no_grad():
        last.bias[len(last.bias) // 2 :] += math.log(sigma) - block.scale.shift
