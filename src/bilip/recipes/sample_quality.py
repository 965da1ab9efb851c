"""How good samples are, without a download: distances between features of a small CNN, and between pixels.

The CNN is an ordinary one, trained on CIFAR-10 by the part `features` of the recipe `flow_gan`; its weights lie beside this file, with
what they reach. Its numbers order models; they are not those of Inception features, and no table of another paper has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from bilip.data import ImageBatches, Images, seed_of
from bilip.errors import CheckpointError, InputError
from bilip.recipes.recipe import Measured, Work
from bilip.training import Task, read_state, save_state

PACKAGED = Path(__file__).with_name("features.safetensors")
NAME = "features.safetensors"
SIZE = 128  # features of an image
CHUNK = 500
SLICES = 256  # directions of the sliced Wasserstein distance


class FeatureNet(nn.Module):
    """Four convolutions of 3 x 3 with BatchNorm and ReLU, pooled to 128 features, and a linear layer to ten classes.

    Images are in [-1/2, 1/2]; smaller ones are enlarged to 32 x 32, each pixel repeated.

    Example:
        >>> FeatureNet().eval().features(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 128])
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, SIZE, SIZE)
        stages = []
        for k, (before, after) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            stages += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            stages += [nn.MaxPool2d(2)] if k < 3 else []
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(SIZE, 10)

    def features(self, x: Tensor) -> Tensor:
        """The features, of shape `(batch, 128)`."""
        if x.shape[-1] < 32:
            x = interpolate(x, size=(32, 32), mode="nearest")
        return self.stages(x * 4).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.features(x))


def train_features(train: Images, test: Images, steps: int, batch: int, work: Work) -> Measured:
    """Train the network, write it into the recipe's folder, and say how many test images it gets right."""
    torch.manual_seed(seed_of(work.seed, 0, "feature weights"))
    net = FeatureNet().to(work.device)
    batches = ImageBatches(train, batch, device=work.device, pad=4, mean=(0.5, 0.5, 0.5))
    tests = ImageBatches(test, 1, device=work.device, pad=0, mean=(0.5, 0.5, 0.5))

    def loss(model: FeatureNet, step: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(model(x), y)}

    def accuracy(model: nn.Module, done: int) -> dict[str, float]:
        right = 0
        for start in range(0, len(test), CHUNK):
            x, y = tests.plain(start, start + CHUNK)
            right += int((model(x).argmax(1) == y).sum())
        return {"accuracy": right / len(test)}

    work.train(
        Task(net, batches, loss, accuracy),
        steps=steps,
        lr=3e-3,
        warmup=max(1, steps // 20),
        milestones=(round(0.6 * steps), round(0.85 * steps)),
        decay=0.2,
        evaluate_every=max(1, steps // 4),
        log_every=max(1, min(100, steps // 4)),
    )
    if not work.main:
        return Measured({})
    found = accuracy(net.eval(), steps)
    facts = {**found, "images": len(train), "test_images": len(test), "steps": steps, "batch": batch, "seed": work.seed}
    save_state(_own(work) or work.folder / NAME, net.state_dict(), facts)
    return Measured(facts)


def load_features(work: Work) -> tuple[FeatureNet, dict[str, Any]]:
    """The network that was trained in the recipe's folder, or else the one that comes with bilip, and what is known of it.

    Raises:
        InputError: There is none.
    """
    own = _own(work)
    path = own if own is not None and own.exists() else PACKAGED
    if not path.exists():
        raise InputError(
            f"the feature network is missing: {path} is not there. Train it first: bilip reproduce flow_gan --parts features."
        )
    tensors, facts = read_state(path)
    net = FeatureNet()
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is not the feature network of flow_gan. Train it again: bilip reproduce flow_gan --parts features."
        ) from error
    return net.eval().to(work.device), {"name": f"CNN, {SIZE} features", **facts}


def _own(work: Work) -> Path | None:
    """Where a network of the user's own lies, for the parts in one `--out`."""
    parents = work.folder.resolve().parents
    return parents[3] / NAME if len(parents) > 3 and parents[2].name == "pieces" else None


# ---- distances


def quality(net: FeatureNet, samples: Tensor, real: Tensor, seed: int) -> dict[str, float]:
    """How far samples are from images, both cut to [-1/2, 1/2]; samples that are not finite are left out, and counted.

    Returns:
        `fid` and `kid` (Fréchet and kernel distance of features), `sliced` (sliced Wasserstein distance of pixels, in grey levels of
        256), all Inf where more than half of the samples are not finite, and `share_non_finite`.
    """
    finite = torch.isfinite(samples.flatten(1)).all(1)
    found = {"count": len(samples), "share_non_finite": float((~finite).double().mean())}
    if float(finite.double().mean()) < 0.5:
        return found | {"fid": math.inf, "kid": math.inf, "kid_error": math.inf, "sliced": math.inf}
    x, y = samples[finite].clamp(-0.5, 0.5), real.clamp(-0.5, 0.5)
    a, b = (_features(net, each) for each in (x, y))
    kid, error = kernel_distance(a, b, seed)
    sliced = sliced_wasserstein(x.flatten(1), y.flatten(1), SLICES, seed)
    return found | {"fid": frechet_distance(a, b), "kid": kid, "kid_error": error, "sliced": 256 * sliced}


@torch.no_grad()
def _features(net: FeatureNet, x: Tensor) -> np.ndarray:
    return torch.cat([net.features(part) for part in x.split(CHUNK)]).double().cpu().numpy()


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    r"""Squared distance of two normal distributions with the means and covariances of two samples, $\lvert \mu_a - \mu_b \rvert^2 +
    \mathrm{tr}(C_a + C_b - 2 (C_a C_b)^{1/2})$.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> x = draw.normal(size=(500, 3))
        >>> round(frechet_distance(x, x + 2), 6)
        12.0
    """
    ca, cb = (np.atleast_2d(np.cov(each, rowvar=False)) for each in (a, b))
    values, vectors = scipy.linalg.eigh(ca)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    cross = scipy.linalg.eigvalsh(root @ cb @ root)  # symmetric, with the eigenvalues of the product
    distance = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(ca) + np.trace(cb)
    return max(0.0, float(distance - 2 * np.sqrt(np.clip(cross, 0, None)).sum()))


def kernel_distance(
    a: np.ndarray, b: np.ndarray, seed: int, *, size: int = 500, draws: int = 20
) -> tuple[float, float]:
    """Squared maximum mean discrepancy with the kernel (x·y/d + 1)³, without bias: the mean over random subsets, and its standard error.

    Features are divided by the root mean square of those of `b`, so that the cube stays tame.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> x, y = draw.normal(size=(2, 600, 8))
        >>> abs(kernel_distance(x, y, 0)[0]) < 0.02 < kernel_distance(x + 1, y, 0)[0]
        True
    """
    scale = np.sqrt(np.square(b).mean()) or 1.0
    draw, found = np.random.default_rng(seed), []
    size = min(size, len(a), len(b))
    if size < 2:
        raise InputError(f"kernel_distance: {len(a)} and {len(b)} rows, expected 2 or more of each.")
    for _ in range(draws):
        x = a[draw.choice(len(a), size, replace=False)] / scale
        y = b[draw.choice(len(b), size, replace=False)] / scale
        own = sum(float(k.sum() - np.trace(k)) for k in (_kernel(x, x), _kernel(y, y)))
        found.append(own / (size * (size - 1)) - 2 * float(_kernel(x, y).mean()))
    return float(np.mean(found)), float(np.std(found) / math.sqrt(draws))


def _kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x @ y.T / x.shape[1] + 1) ** 3


def sliced_wasserstein(x: Tensor, y: Tensor, slices: int, seed: int) -> float:
    """The root mean square of the Wasserstein-2 distance of projections onto random directions: about that of a single coordinate, and in
    its unit.

    Example:
        >>> x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
        >>> abs(sliced_wasserstein(x, x + 3, 4000, 0) - 3) < 0.2
        True
    """
    count = min(len(x), len(y))
    total, size = 0.0, x.shape[1]
    for directions in _directions(size, slices, seed):
        d = directions.to(x)
        a, b = ((each[:count] @ d).sort(0).values for each in (x, y))
        total += float((a - b).double().square().mean(0).sum())
    return math.sqrt(total / slices)


def _directions(size: int, slices: int, seed: int) -> Iterator[Tensor]:
    """Unit vectors, some at a time."""
    generator = torch.Generator().manual_seed(seed_of(seed, 0, "slices"))
    for start in range(0, slices, 64):
        d = torch.randn(size, min(64, slices - start), generator=generator)
        yield d / d.norm(dim=0)
