"""Linear algebra of models: products with Jacobians, their singular values, and determinants of stacks of matrices.

`jacobian` has products with Jacobians, by whichever road a model allows; `lanczos` the largest and the mean logarithm of the singular
values of a map that can only be applied; `structured` the Jacobians that can be written down; `linearized` whole models and the inverses
of their Jacobians.
"""

from bilip._linalg import det, inv, inv_ex, lu, slogdet, solve, solve_ex
from bilip.linalg.jacobian import jvp, jvp_many, vjp, vjp_many
from bilip.linalg.lanczos import Extreme, largest_singular_value, mean_log_brackets
from bilip.linalg.linearized import Linearized, LinearPart
from bilip.linalg.structured import Room, Structured, structured

__all__ = [
    "Extreme",
    "LinearPart",
    "Linearized",
    "Room",
    "Structured",
    "det",
    "inv",
    "inv_ex",
    "largest_singular_value",
    "lu",
    "mean_log_brackets",
    "vjp",
    "vjp_many",
    "jvp",
    "jvp_many",
    "slogdet",
    "solve",
    "solve_ex",
    "structured",
]
