"""Flows from the weights of two published codes: y0ast/Glow-PyTorch and rtqichen/residual-flows.

Only tensors are read. What comes back is made of the blocks of this library and computes what the published code computes in evaluation
mode, up to rounding; so it can be audited, bounded, attacked and trained on like any other flow.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.blocks import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Bijection,
    Chain,
    FactorOut,
    Flatten,
    Flow,
    InvertibleConv1x1,
    Logit,
    Permutation,
    Residual,
    Split,
    Squeeze,
)
from bilip.errors import BilipError, CheckpointError, InputError, said_by
from bilip.nets import Declared, HeldConv2d, HeldLinear
from bilip.nets.activations import ScaledSwish
from bilip.nets.layers import GainConv2d

__all__ = ["import_glow", "import_residual_flow"]

Weights = Mapping[str, Tensor]


@contextmanager
def _fitting(code: str) -> Iterator[None]:
    """Say as such what torch objects to where tensors of a state_dict do not fit each other."""
    try:
        yield
    except BilipError:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"tensors of the state_dict do not fit each other ({said_by(error)}): is it one of {code}?"
        ) from error


@_fitting("Glow-PyTorch")
def import_glow(weights: Weights | str | Path) -> Flow:
    r"""A Glow with the weights of y0ast/Glow-PyTorch, for images in [-1/2, 1/2].

    There, couplings shift first and scale then, $z_2 = (x_2 + t(x_1))\,\sigma(s(x_1) + 2)$. Here each is an additive coupling followed by
    an affine one without a shift. ActNorms inside of nets are multiplied into the convolutions. Priors that are
    learned become couplings in front of what leaves, and an ActNorm in front of the top, so that the base is a standard normal.
    Where there is no 1x1 convolution channels are reversed: the code's other choice, a random shuffle, is not in its state_dict, and
    cannot be told from a reversal.

    Args:
        weights: A state_dict, or the file that `torch.save` wrote of one; it is read without running anything in it.

    Raises:
        CheckpointError: The tensors are not those of an unconditional Glow with 1x1 convolutions or reversed channels.

    Example:
        >>> channels, mixed = 12, torch.linalg.qr(torch.randn(12, 12))[0]
        >>> zero, step = torch.zeros, "flow.layers.1."
        >>> weights = {
        ...     "prior_h": zero(1, 24, 4, 4),
        ...     step + "actnorm.bias": zero(1, 12, 1, 1),
        ...     step + "actnorm.logs": zero(1, 12, 1, 1),
        ...     step + "invconv.weight": mixed,
        ...     step + "block.0.conv.weight": torch.randn(4, 6, 3, 3),
        ...     step + "block.0.actnorm.bias": zero(1, 4, 1, 1),
        ...     step + "block.0.actnorm.logs": zero(1, 4, 1, 1),
        ...     step + "block.2.conv.weight": torch.randn(4, 4, 1, 1),
        ...     step + "block.2.actnorm.bias": zero(1, 4, 1, 1),
        ...     step + "block.2.actnorm.logs": zero(1, 4, 1, 1),
        ...     step + "block.4.logs": zero(12, 1, 1),
        ...     step + "block.4.conv.weight": zero(12, 4, 3, 3),
        ...     step + "block.4.conv.bias": zero(12),
        ... }
        >>> import_glow(weights).log_prob(torch.rand(2, 3, 8, 8) - 0.5).shape
        torch.Size([2])
    """
    read = _Reader(_tensors(weights), "Glow-PyTorch")
    top = read("prior_h", 4)
    numbers = sorted({int(m[1]) for name in read.tensors if (m := re.match(r"flow\.layers\.(\d+)\.", name))})
    if not numbers or any("project_" in name for name in read.tensors):
        raise CheckpointError(
            "import_glow: expected the tensors flow.layers.1.... of an unconditional Glow; there are none, or it is conditioned on classes."
        )
    # Numbers of the steps of a level, and of the split that ends it.
    levels: list[tuple[list[int], int | None]] = [([], None)]
    for k in numbers:
        if f"flow.layers.{k}.conv.conv.weight" in read.tensors:
            levels[-1] = (levels[-1][0], k)
            levels.append(([], None))
        else:
            levels[-1][0].append(k)
    if not all(steps for steps, _ in levels):
        raise CheckpointError("import_glow: a level holds no step; tensors of the state_dict are missing.")
    channels = read(f"flow.layers.{levels[0][0][0]}.actnorm.bias", 4).shape[1]
    side = [n * 2 ** len(levels) for n in top.shape[2:]]
    shape = (channels // 4, *side)

    def from_level(k: int, shape: tuple[int, ...]) -> Chain:
        squeeze = Squeeze()
        inside = squeeze.out_shape(shape)
        chain: list[Bijection] = [squeeze]
        for number in levels[k][0]:
            chain += _glow_step(read, f"flow.layers.{number}.", inside[0])
        split = levels[k][1]
        if split is None:
            return Chain(*chain, Flatten(inside), _top(read, top), shape=shape)
        keep = inside[0] // 2
        chain += _split_prior(read, f"flow.layers.{split}.conv.", keep)
        return Chain(*chain, FactorOut(from_level(k + 1, (keep, *inside[1:])), inside, keep=keep), shape=shape)

    flow = Flow(from_level(0, shape))
    read.require_used({"prior_h"})
    return flow.eval()


def _glow_step(read: _Reader, name: str, channels: int) -> list[Bijection]:
    chain: list[Bijection] = [_actnorm(read(f"{name}actnorm.bias", 4), read(f"{name}actnorm.logs", 4))]
    chain.append(_mixing(read, name, channels))
    first, second = (_normalised_conv(read, f"{name}block.{k}.") for k in (0, 2))
    half = channels // 2
    gain, weight, bias = (read(f"{name}block.4.{what}") for what in ("logs", "conv.weight", "conv.bias"))
    if len(weight) == half:
        return [*chain, AdditiveCoupling(_net(first, second, weight, bias, gain.flatten()))]
    if len(weight) != channels:
        raise CheckpointError(f"import_glow: {name}block.4 has {len(weight)} outputs; expected {half} or {channels}.")
    shift, raw = (_net(first, second, weight[k::2], bias[k::2], gain.flatten()[k::2]) for k in (0, 1))
    return [*chain, AdditiveCoupling(shift), _scaling(raw, half)]


def _mixing(read: _Reader, name: str, channels: int) -> Bijection:
    """The 1x1 convolution of a step, in the form that it has; without one channels are reversed."""
    inner = f"{name}invconv."
    if f"{inner}weight" in read.tensors:
        block = InvertibleConv1x1(channels)
        return _filled(block, {"weight": read(f"{inner}weight", 2)})
    if f"{inner}lower" in read.tensors:
        block = InvertibleConv1x1(channels, kind="plu")
        p = read(f"{inner}p", 2)
        values = {
            "lower": read(f"{inner}lower", 2).tril(-1),
            "upper": read(f"{inner}upper", 2).triu(1),
            "log_diagonal": read(f"{inner}log_s", 1),
            "sign": read(f"{inner}sign_s", 1),
            "permutation": p.argmax(0),
        }
        if not torch.equal(torch.zeros_like(p).index_put_((p.argmax(0), torch.arange(len(p))), torch.ones(())), p):
            raise CheckpointError(f"import_glow: {inner}p is not a permutation matrix.")
        return _filled(block, values)
    return Permutation.reverse(channels)


def _split_prior(read: _Reader, name: str, keep: int) -> list[Bijection]:
    """Means and deviations of the channels that leave: subtracted, and divided by."""
    gain, weight, bias = (read(f"{name}{what}") for what in ("logs", "conv.weight", "conv.bias"))
    mean, log = (
        _filled(
            GainConv2d(keep, len(weight) // 2),
            {"weight": -weight[k::2], "bias": -bias[k::2], "log_gain": gain.flatten()[k::2]},
        )
        for k in (0, 1)
    )
    split = Split(size=keep)
    return [AdditiveCoupling(mean, split), _scaling(log, keep, scale="exp")]


def _scaling(raw: nn.Module, keep: int, scale: str = "sigmoid") -> AffineCoupling:
    """An affine coupling with a raw scale and no shift."""
    nothing = nn.Conv2d(keep, keep, 1)
    for p in nothing.parameters():
        nn.init.zeros_(p)
    return AffineCoupling(nothing, raw, scale=scale, partition=Split(size=keep))


def _top(read: _Reader, h: Tensor) -> ActNorm:
    """The prior of what remains, entry by entry."""
    if "learn_top_fn.conv.weight" in read.tensors:
        gain, weight, bias = (read(f"learn_top_fn.{what}") for what in ("logs", "conv.weight", "conv.bias"))
        h = F.conv2d(h, weight, bias, padding=weight.shape[-1] // 2) * (3 * gain).exp()
    mean, logs = h[0].flatten(1).chunk(2, 0)
    return _actnorm(-mean, -logs)


# ---- residual flows


@_fitting("residual-flows")
def import_residual_flow(
    weights: Weights | str | Path, *, coefficient: float = 0.98, alpha: float = 0.05, contraction: str = "declared"
) -> Flow:
    r"""A residual flow with the weights of rtqichen/residual-flows, for images in [0, 1].

    There, a layer divides its weight by $\max(1, \hat\sigma / c)$, with a norm $\hat\sigma$ that power iteration found, from below; so
    the code claims that a branch of n layers contracts by $c^n$, and proves it not. `contraction` says what stands for it here:

    * `"declared"`: the weights as they act there, and that claim. Errors that inverses state rest on it.
    * `"certified"`: the same weights, and norms that are certified here, for images of any size, which may be too large by
      some percent for small ones.
    * `"held"`: layers that are held below c by certificate, hence with weights that are a little smaller.

    Args:
        weights: A state_dict, a checkpoint that holds one as `state_dict`, or the file that `torch.save` wrote of either; it is read
            without running anything in it.
        coefficient: The code's `coeff`, c.
        alpha: Of the logit that it begins with.
        contraction: `"declared"`, `"certified"` or `"held"`.

    Raises:
        CheckpointError: The tensors are not those of a residual flow on images that begins with a logit, with Swish and 2-norms, without
            factor-out.
        NotAContraction: With `"certified"`: a branch is not proved to contract.

    Example:
        >>> block, v = "transforms.0.chain.2.nnet.", torch.full((48,), 48**-0.5)
        >>> weights = {
        ...     "transforms.0.chain.1.weight": torch.zeros(3),
        ...     "transforms.0.chain.1.bias": torch.zeros(3),
        ...     block + "0.weight": 0.1 * torch.randn(3, 3, 3, 3),
        ...     block + "0.bias": torch.zeros(3),
        ...     block + "0.u": v,
        ...     block + "0.v": v,
        ... }
        >>> flow = import_residual_flow(weights)
        >>> [type(part).__name__ for part in flow.bijection]
        ['Logit', 'ActNorm', 'Residual']
        >>> flow.bijection(torch.rand(2, 3, 4, 4)).shape
        torch.Size([2, 3, 4, 4])
    """
    if contraction not in ("declared", "certified", "held"):
        raise InputError(f"contraction={contraction!r}: expected 'declared', 'certified' or 'held'.")
    if not 0 < coefficient < 1:
        raise InputError(f"coefficient={coefficient}: expected a number between 0 and 1.")
    read = _Reader(_tensors(weights), "residual-flows")
    scales = sorted({int(m[1]) for name in read.tensors if (m := re.match(r"transforms\.(\d+)\.chain\.", name))})
    if not scales or scales != list(range(len(scales))):
        raise CheckpointError("import_residual_flow: expected the tensors transforms.0.chain.... of a residual flow.")
    if any(name.startswith("transforms.0.chain.0.") for name in read.tensors):
        raise CheckpointError(
            "import_residual_flow: transforms.0.chain.0 has tensors; expected the logit there, which has none."
        )
    chain: list[Bijection] = [Logit(alpha)]
    shape = _image_shape(read)
    now: tuple[int, ...] = shape
    for k in scales:
        prefix = f"transforms.{k}.chain."
        for j in sorted({int(m[1]) for name in read.tensors if (m := re.match(re.escape(prefix) + r"(\d+)\.", name))}):
            name = f"{prefix}{j}."
            if f"{name}nnet.nnet.1.weight" in read.tensors or f"{name}nnet.nnet.0.weight" in read.tensors:
                if len(now) > 1:
                    chain.append(Flatten(now))
                    now = (math.prod(now),)
                chain.append(_residual(read, f"{name}nnet.nnet.", now, coefficient, contraction))
            elif any(tensor.startswith(f"{name}nnet.") for tensor in read.tensors):
                chain.append(_residual(read, f"{name}nnet.", now, coefficient, contraction))
            else:
                inner = f"{name}fc_module." if f"{name}fc_module.bias" in read.tensors else name
                bias = read(f"{inner}bias", 1)
                _require_features(f"{inner}bias", len(bias), now[0] if now else 0)
                chain.append(_actnorm(bias, read(f"{inner}weight", 1)))
        if k < scales[-1]:
            squeeze = Squeeze()
            chain.append(squeeze)
            now = squeeze.out_shape(now)
    notes = ("geom_p", "lamb", "last_n_samples", "last_firmom", "last_secmom", "initialized", "spatial_dims", "scale")
    read.require_used({name for name in read.tensors if name.rsplit(".", 1)[-1] in notes})
    return Flow(Chain(*chain, shape=shape)).eval()


def _image_shape(read: _Reader) -> tuple[int, int, int]:
    """The shape of an image, from the singular vector of the first convolution."""
    names = [name for name in read.tensors if re.fullmatch(r"transforms\.0\.chain\.\d+\.nnet\.\d+\.weight", name)]
    convs = [name for name in names if read.tensors[name].ndim == 4 and read.tensors[name].shape[-1] > 1]
    if not convs:
        raise CheckpointError("import_residual_flow: there is no convolution in the first scale.")
    first = min(convs, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    channels = read.tensors[first].shape[1]
    entries = read(f"{first.removesuffix('weight')}v", 1).numel() // channels
    known = read.tensors.get(f"{first.removesuffix('weight')}spatial_dims")
    height = math.isqrt(entries) if known is None else int(known[0])
    return channels, height, entries // height


def _residual(read: _Reader, prefix: str, shape: tuple[int, ...], coefficient: float, contraction: str) -> Residual:
    branch = _branch(read, prefix, shape, coefficient, hold=contraction == "held")
    if contraction != "declared":
        return Residual(branch)
    layers = sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in branch)
    return Residual(Declared(branch, lipschitz=coefficient**layers))


def _branch(read: _Reader, prefix: str, shape: tuple[int, ...], coefficient: float, *, hold: bool) -> nn.Sequential:
    """The layers of a branch, in their order: activations and layers whose weights are divided by their norms."""
    found = (m for name in read.tensors if (m := re.match(re.escape(prefix) + r"(\d+)\.", name)))
    layers: list[nn.Module] = []
    features, active = shape[0], True  # what comes in, and whether an activation or nothing is before it
    for k in sorted({int(m[1]) for m in found}):
        name = f"{prefix}{k}."
        if f"{name}beta" in read.tensors:
            layers.append(_filled(ScaledSwish(), {"raw_beta": read(f"{name}beta", 1).reshape(())}))
            active = True
            continue
        if not active or (k and not layers):
            raise CheckpointError(
                f"import_residual_flow: before {name}weight there is no beta of a Swish. Other activations have no tensors, and cannot be "
                "told from a state_dict."
            )
        weight, bias = read(f"{name}weight"), read(f"{name}bias", 1)
        sigma = _norm(weight, read(f"{name}u", 1), read(f"{name}v", 1), shape[1:])
        weight = weight / torch.clamp(sigma / coefficient, min=1.0)
        rows, columns, *kernel = weight.shape
        _require_features(f"{name}weight", columns, features)
        features, active = rows, False
        if kernel:
            side = kernel[0]
            layer = (
                HeldConv2d(columns, rows, side, coefficient=coefficient)
                if hold
                else nn.Conv2d(columns, rows, side, padding=side // 2)
            )
        else:
            layer = HeldLinear(columns, rows, coefficient=coefficient) if hold else nn.Linear(columns, rows)
        layers.append(_filled(layer, {"weight": weight, "bias": bias}))
    _require_features(f"{prefix}..., the sum with its input", shape[0], features)
    return nn.Sequential(*layers)


def _require_features(name: str, takes: int, come: int) -> None:
    if takes != come:
        raise CheckpointError(
            f"import_residual_flow: {name} takes {takes} features, and {come} come in. Flows with factor-out, or with ActNorms of single "
            "entries between images, are not read here."
        )


def _norm(weight: Tensor, u: Tensor, v: Tensor, image: Sequence[int]) -> Tensor:
    """The norm that the published code divides by: that of power iteration as it was left, from the vectors u and v."""
    if weight.ndim == 2 or weight.shape[-1] == 1:
        return u @ weight.flatten(1) @ v
    moved = F.conv2d(v.view(1, weight.shape[1], *image), weight, padding=weight.shape[-1] // 2)
    return u @ moved.flatten()


# ---- both


class _Reader:
    """Tensors by name, with an error that names what is missing or has another shape."""

    def __init__(self, tensors: Weights, code: str) -> None:
        self.tensors, self.code, self.used = dict(tensors), code, set[str]()

    def __call__(self, name: str, ndim: int | None = None) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the state_dict has no tensor {name!r}: is it one of {self.code}?")
        if ndim is not None and tensor.ndim != ndim:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}; expected {ndim} dimensions.")
        self.used.add(name)
        return tensor.detach().cpu().float()

    def require_used(self, others: set[str]) -> None:
        """Raise a `CheckpointError` if there are tensors that nothing was made of."""
        left = sorted(set(self.tensors) - self.used - others)
        if left:
            raise CheckpointError(
                f"the state_dict has {len(left)} tensors that a model of {self.code} as it is read here has not, such as {left[0]!r}."
            )


def _tensors(weights: Weights | str | Path) -> Weights:
    if isinstance(weights, (str, Path)):
        try:
            # Options, which one of the codes keeps beside its tensors.
            with torch.serialization.safe_globals([argparse.Namespace]):
                weights = torch.load(weights, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged files raise errors of any kind
            raise CheckpointError(f"{weights} holds no tensors that can be read safely ({error!s:.200}).") from error
    if isinstance(weights, Mapping) and isinstance(weights.get("state_dict"), Mapping):
        weights = weights["state_dict"]  # type: ignore[assignment]
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"expected a state_dict or its file, got {type(weights).__name__}.")
    return {name.removeprefix("module."): value for name, value in weights.items()}


def _filled(module, values: Mapping[str, Tensor]):
    """A module with these parameters and buffers."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in values.items():
            if own[name].shape != value.shape:
                raise CheckpointError(
                    f"a {type(module).__name__} has {name} of shape {tuple(own[name].shape)}; the state_dict gives {tuple(value.shape)}."
                )
            own[name].copy_(value)
    return module


def _actnorm(bias: Tensor, log_scale: Tensor) -> ActNorm:
    block = ActNorm(bias.numel(), start="identity")
    return _filled(block, {"bias": bias.flatten(), "log_scale": log_scale.flatten()})


def _normalised_conv(read: _Reader, name: str) -> nn.Conv2d:
    """A convolution and the ActNorm after it, as one."""
    weight, bias, logs = (read(f"{name}{what}", 4) for what in ("conv.weight", "actnorm.bias", "actnorm.logs"))
    gain = logs.exp().flatten()
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[-1], padding=weight.shape[-1] // 2)
    return _filled(conv, {"weight": weight * gain.view(-1, 1, 1, 1), "bias": bias.flatten() * gain})


def _net(first: nn.Conv2d, second: nn.Conv2d, weight: Tensor, bias: Tensor, gain: Tensor) -> nn.Sequential:
    """The net of a coupling, with some outputs of its last layer; its first layers are copies."""
    layers = [copy.deepcopy(conv) for conv in (first, second)]
    last = _filled(GainConv2d(weight.shape[1], len(weight)), {"weight": weight, "bias": bias, "log_gain": gain})
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), last)
