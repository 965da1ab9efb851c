"""The training loop on Lightning Fabric, its checkpoints, and a callback for Lightning code of your own."""

from typing import TYPE_CHECKING

from bilip.training.average import Average
from bilip.training.log import Log, read_log
from bilip.training.loop import launch, train
from bilip.training.monitor import StabilityMonitor, StabilityRow
from bilip.training.run import Trained
from bilip.training.settings import Settings
from bilip.training.state import load_weights, read_state, save_state
from bilip.training.task import Draw, Task

if TYPE_CHECKING:
    from bilip.training.callback import StabilityCallback

__all__ = [
    "Average",
    "Draw",
    "Log",
    "Settings",
    "StabilityCallback",
    "StabilityMonitor",
    "StabilityRow",
    "Task",
    "Trained",
    "launch",
    "load_weights",
    "read_log",
    "read_state",
    "save_state",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "StabilityCallback":  # a subclass of Lightning's own: needs Lightning to exist
        from bilip.training.callback import StabilityCallback

        return StabilityCallback
    raise AttributeError(f"module 'bilip.training' has no attribute {name!r}")
