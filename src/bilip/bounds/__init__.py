r"""Boxes and proven bi-Lipschitz bounds.

A map $F$ is bi-Lipschitz on a set $D$ when

$$\tfrac{1}{L^*}\,|x - x'| \;\le\; |F(x) - F(x')| \;\le\; L\,|x - x'| \qquad (x, x' \in D),$$

with $L \ge \mathrm{Lip}(F)$ on $D$ and $L^* \ge \mathrm{Lip}(F^{-1})$ on $F(D)$. This module holds the two numbers
(`BiLipschitz`), the sets on which they are proved (`Box`), and the arithmetic that keeps both on the safe side:
constants are logarithms, because products over a network overflow, and every operation rounds outward.
"""

from bilip.bounds.bilipschitz import BiLipschitz, BlockBound
from bilip.bounds.box import Box
from bilip.bounds.logs import *  # noqa: F403
from bilip.bounds.logs import __all__ as _arithmetic

__all__ = ["BiLipschitz", "BlockBound", "Box", *_arithmetic]  # pyright: ignore[reportUnsupportedDunderAll]
