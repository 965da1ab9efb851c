r"""The contract of a bijection, for your own blocks and your own test suite.

`check_contract` checks every promise of the interface: round trips, log-determinants against the Jacobian, bounds
that no measured gain exceeds, enclosures that hold, gradients, and a state dict that carries everything.
`assert_invertible` is the one line for a trained model. `search_gains` looks for the largest gains of a map and its
inverse, the adversary of every bound.
"""

from bilip.testing.contract import check_contract
from bilip.testing.gains import Gains, search_gains
from bilip.testing.invertible import assert_invertible, rounding_tolerance

__all__ = ["Gains", "assert_invertible", "check_contract", "rounding_tolerance", "search_gains"]
