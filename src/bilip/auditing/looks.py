"""How many samples are bad: intervals that stay valid when one looks repeatedly, on a fixed schedule of counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from scipy.special import betaincinv

__all__ = ["CONFIDENCE", "Looks", "SequentialTest", "share_interval"]

CONFIDENCE = 0.99
_SPENT = (0.125, 0.5, 0.25)  # of the error, at the first looks; the rest is halved from look to look, and the sum is 1


def _error(look: int | None) -> float:
    """What one side of the interval may err with at a look; all of it where there is only one."""
    side = (1 - CONFIDENCE) / 2
    if look is None:
        return side
    return side * (_SPENT[look] if look < len(_SPENT) else 0.125 / 2 ** (look - len(_SPENT) + 1))


def share_interval(bad: int, count: int, look: int | None = None) -> tuple[float, float]:
    """What the true share of bad samples lies in, with 99 % confidence over all looks together.

    The interval of Clopper and Pearson, with a part of the error that belongs to the look: an early look has little, so that it decides
    clear cases only.

    Args:
        bad: Bad samples.
        count: All samples.
        look: Number of the look, from 0; `None` if there is one only.

    Example:
        >>> low, high = share_interval(0, 640, look=1)
        >>> low, round(100 * high, 2)
        (0.0, 0.93)
        >>> low, high = share_interval(22, 640)
        >>> round(100 * low, 1), round(100 * high, 1)
        (1.9, 5.7)
    """
    if count < 1:
        return 0.0, 1.0
    error = _error(look)
    low = 0.0 if bad == 0 else float(betaincinv(bad, count - bad + 1, error))
    high = 1.0 if bad == count else float(betaincinv(bad + 1, count - bad, 1 - error))
    return low, high


@dataclass(frozen=True)
class Looks:
    """When to look, and when enough was seen. The counts are fixed in advance, so that an audit can be repeated.

    Args:
        allowed: Allowed share of bad samples.
        most: Largest number of samples; `None` for as many as there are.

    Example:
        >>> Looks(0.01).schedule(10_000)[:4], Looks(0.01, most=1000).schedule(10_000)
        ([128, 640, 1280, 2560], [128, 640, 1000])
        >>> Looks(0.01).decided(0, bad=128, count=128), Looks(0.01).decided(0, bad=0, count=128)
        (True, False)
    """

    allowed: float
    most: int | None = None

    @property
    def needed(self) -> int:
        """Samples, none of them bad, after which the allowed share is excluded at the second look, in steps of 64."""
        if not 0 < self.allowed < 1:
            return 64
        exact = math.log(_error(1)) / math.log1p(-self.allowed)
        return 64 * math.ceil(1.02 * exact / 64)

    def schedule(self, total: int) -> list[int]:
        """The counts at which to look, up to `total` samples."""
        total = total if self.most is None else min(total, self.most)
        found = [max(16, 64 * round(self.needed / 5 / 64)), self.needed]
        while found[-1] < total:
            found.append(2 * found[-1])
        return [*(n for n in found if n < total), total]

    def decided(self, look: int, bad: int, count: int) -> bool:
        """Whether the interval lies on one side of the allowed share."""
        low, high = share_interval(bad, count, look)
        return low > self.allowed or (high <= self.allowed and look > 0)


@dataclass
class SequentialTest:
    """Ranges of samples to examine, up to the look that decides; the caller counts `bad` as it goes.

    Example:
        >>> test = SequentialTest(Looks(0.01), total=5000, batch=256)
        >>> for start, stop in test:
        ...     test.bad += 0
        >>> test.count, test.look
        (640, 1)
    """

    looks: Looks | None
    total: int
    batch: int
    bad: int = 0
    count: int = 0
    look: int | None = None
    schedule: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.schedule = [self.total] if self.looks is None else self.looks.schedule(self.total)
        for look, end in enumerate(self.schedule):
            while self.count < end:
                start, self.count = self.count, min(self.count + self.batch, end)
                yield start, self.count
            if self.looks is not None:
                self.look = look
                if self.looks.decided(look, self.bad, self.count):
                    return

    @property
    def progress(self) -> float:
        """The share of the next look that is done."""
        return self.count / self.total
