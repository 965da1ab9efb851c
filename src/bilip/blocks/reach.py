"""How far a set of points reaches on its way through a network: the state of a proof."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bilip.bounds import BlockBound, Box, log_product

__all__ = ["Reach", "Step"]


@dataclass(frozen=True)
class Reach:
    """A set enclosed twice: by a box, and by a ball around the image of one point.

    Attributes:
        box: Encloses the set.
        center: Encloses the image of the starting box's centre; `None` when there is no ball.
        log_radius: Log of the ball's radius: the product of the constants so far times the starting radius.
        asked_bounded: Whether the proof began on a bounded set, so that an infinity now means overflow.
    """

    box: Box
    center: Box | None
    log_radius: float
    asked_bounded: bool

    @classmethod
    def start(cls, box: Box) -> Reach:
        """The box that a proof begins with."""
        if box.shape and box.is_bounded:
            return cls(box, Box.point(box.center), box.log_radius, True)
        return cls(box, None, math.inf, box.is_bounded)

    def through(self, interval: Callable[[Box], Box], log_lip: float) -> Reach:
        """The reach after a map with this interval extension and this Lipschitz constant on the present box."""
        if not self.box.shape:
            return Reach(Box.everything(), None, math.inf, False)  # without a shape nothing is enclosed
        image = interval(self.box)
        if self.center is None:
            return self.restarted(image)
        center, log_radius = interval(self.center), log_product(self.log_radius, log_lip)
        if log_radius < 700 and center.is_bounded:
            radius = math.exp(log_radius) * (1 + 1e-12)
            image = image.intersect(Box.outward(center.low - radius, center.high + radius))
        ball = Reach(image, center, log_radius, self.asked_bounded)
        fresh = self.restarted(image)
        # The centre's own enclosure widens with depth; what counts is how far ball and width together reach.
        worn = log_radius if not center.is_bounded else max(log_radius, center.log_radius)
        return fresh if fresh.center is not None and (fresh.log_radius < worn or not center.is_bounded) else ball

    def restarted(self, image: Box) -> Reach:
        """The reach that knows only this box."""
        fresh = Reach.start(image)
        return Reach(fresh.box, fresh.center, fresh.log_radius, self.asked_bounded)


@dataclass(frozen=True)
class Step:
    """What a proof learned from one block or a whole chain."""

    log_forward: float
    log_inverse: float
    reach: Reach
    blocks: tuple[BlockBound, ...]
