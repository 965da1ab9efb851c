"""Are the model's own samples finite, and does the model recognise them?"""

from __future__ import annotations

import math

import torch

from bilip.adapters import Base
from bilip.auditing.probes.pictures import is_image, picture
from bilip.auditing.probes.probe import Probe
from bilip.auditing.round_trip import distances
from bilip.auditing.subject import Subject
from bilip.data import Source
from bilip.errors import NotMeasured
from bilip.record import Histogram, Measurement, Picture

__all__ = ["Sampling"]


class Sampling(Probe):
    r"""Latents from the base, $x = F^{-1}(z)$: finite? re-encodable, $F(x) = z$? as likely as data?

    Not measured without a base distribution. Conditional models take the contexts of the source, in order.

    Args:
        count: Number of samples drawn.
        batch: Samples in one batch.
        seed: Seed of the draws.

    Example:
        >>> import bilip
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, coupling="additive"))
        >>> m = Sampling(100).measure(flow, torch.randn(10, 2))
        >>> m["share_non_finite"], m["reencode_relative_max"] < 1e-5
        (0.0, True)
    """

    name = "sampling"

    def __init__(self, count: int = 512, *, batch: int = 256, seed: int = 0) -> None:
        self.count, self.batch, self.seed = count, batch, seed

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        if subject.base is None:
            raise NotMeasured("the model has no base distribution; pass a flow, or wrap the bijection with bilip.Flow")
        size = math.prod(source.shape)
        torch.manual_seed(self.seed)
        generator = torch.Generator(device=subject.device).manual_seed(self.seed)
        code, bits = Histogram(), []
        done = broken = failed = 0
        pictures: tuple[Picture, ...] = ()
        wanted = self.count if source.context_shape is None else min(self.count, source.count)
        for batch in _repeated(source, self.batch, wanted, subject):
            z = _draw(subject.base, len(batch.x), batch.context, generator)
            drawn = subject.inverse(z, batch.context)
            x = drawn.value
            if not done and is_image(tuple(x.shape[1:])):
                pictures = _samples(x, source)
            failed += int(drawn.failed.sum())
            broken += int((~torch.isfinite(x.flatten(1)).all(1)).sum())
            again = subject.forward(x, batch.context).value
            code += Histogram.of(distances(z, again).relative.cpu())
            bits.append(_bits(subject, x, batch.context, size))
            done += len(batch.x)
            self.progress(done / wanted)
        data = next(iter(source.batches(self.batch, limit=self.batch, dtype=subject.dtype, device=subject.device)))
        data_bits = _bits(subject, data.x, data.context, size)
        all_bits = torch.cat(bits)
        values = {
            "count": done,
            "share_non_finite": broken / done,
            "share_failed": failed / done,
            "reencode_share_non_finite": code.share_non_finite,
            "reencode_relative_median": code.quantile(0.5),
            "reencode_relative_p999": code.quantile(0.999),
            "reencode_relative_max": code.largest,
            "sample_bits_median": _median(all_bits),
            "sample_bits_share_non_finite": float((~torch.isfinite(all_bits)).double().mean()),
            "data_bits_median": _median(data_bits),
        }
        return Measurement(self.name, "base", values=values, histograms={"reencode_relative": code}, pictures=pictures)


def _repeated(source: Source, size: int, wanted: int, subject: Subject):
    """Batches of the source, over and over, until enough samples are drawn."""
    done = 0
    while done < wanted:
        for batch in source.batches(size, limit=wanted - done, dtype=subject.dtype, device=subject.device):
            yield batch
            done += len(batch)


def _draw(base: Base, count: int, context: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    try:
        return base.sample(count, context, generator)
    except Exception as error:  # a foreign base may raise anything
        raise NotMeasured(f"the base distribution gives no samples: {' '.join(str(error).split())}") from error


def _bits(subject: Subject, x: torch.Tensor, context: torch.Tensor | None, size: int) -> torch.Tensor:
    """Bits per dimension of each sample; NaN where the model states no log-determinant."""
    if not subject.has_log_det or subject.base is None:
        return torch.full((len(x),), math.nan)
    z, log_det = subject.forward_and_log_det(x, context).values
    with torch.no_grad():
        finite = torch.isfinite(z.flatten(1)).all(1)
        safe = torch.where(finite.view(-1, *[1] * (z.ndim - 1)), z, torch.zeros_like(z))
        log_prob = subject.base.log_prob(safe, context).double() + log_det.double()
    log_prob = torch.where(finite, log_prob, torch.full_like(log_prob, math.nan))
    return (-log_prob / (size * math.log(2))).cpu()


def _median(values: torch.Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if len(finite) else math.nan


def _samples(x: torch.Tensor, source: Source) -> tuple[Picture, ...]:
    range_ = source.statistics()
    return tuple(
        picture(x[k], range_.low, range_.high, f"sample {k}", f"sample {k} of the model", "samples")
        for k in range(min(8, len(x)))
    )
