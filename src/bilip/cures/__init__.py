"""What repairs a trained model, each cure checked by an audit before it is offered; what broke one; which ranges to build with."""

from bilip.cures.advise import Advice, Design, advise
from bilip.cures.cure import cure
from bilip.cures.diagnose import Diagnosis, diagnose
from bilip.cures.result import Attempt, Cure, restore
from bilip.cures.rung import RUNGS, Rung
from bilip.cures.watching import NonFinite, Watch, watch

__all__ = [
    "RUNGS",
    "Advice",
    "Attempt",
    "Cure",
    "Design",
    "Diagnosis",
    "NonFinite",
    "Rung",
    "Watch",
    "advise",
    "cure",
    "diagnose",
    "restore",
    "watch",
]


def __getattr__(name: str) -> object:
    if name == "DiagnoseCallback":  # a subclass of Lightning's own: needs Lightning to exist
        from bilip.cures.callback import DiagnoseCallback

        return DiagnoseCallback
    raise AttributeError(f"module 'bilip.cures' has no attribute {name!r}")
