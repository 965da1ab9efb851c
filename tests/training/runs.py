"""Small runs for the tests of the loop, also as a program: python runs.py FOLDER STEPS DEVICES KIND."""

import sys

import torch

from bilip import Flow, Reversible, models
from bilip.data import checkerboard
from bilip.objectives import Likelihood
from bilip.regularizers import FiniteDifference
from bilip.training import Settings, Task, train

SETTINGS = {
    "seed": 1,
    "lr": 5e-3,
    "warmup": 10,
    "milestones": (60,),
    "evaluate_every": 25,
    "save_every": 7,
    "log_every": 10,
    "device": "cpu",
}


def silent(done, steps, latest):
    pass


def make_task(kind: str = "all", batch: int = 48) -> Task:
    """`all`: a guarded walk, ActNorms, a penalty every third step, and dropout; `flow`: the likelihood alone."""
    torch.manual_seed(0)
    trunk = models.real_nvp(2, blocks=4, hidden=(16, 16), actnorm=True)
    penalties = ()
    if kind == "all":
        for block in trunk:
            if hasattr(block, "t"):
                block.t.layers.insert(2, torch.nn.Dropout(0.1))
        trunk = Reversible(trunk)
        penalties = (FiniteDifference(0.01, every=3),)
    held_out = checkerboard(200, 99)
    return Task(
        Flow(trunk),
        lambda draw: (checkerboard(batch, draw("data")),),
        Likelihood(penalties),
        lambda model, done: {"test_loss": float(-model.log_prob(held_out).mean())},
        penalties,
    )


def make_settings(**changes) -> Settings:
    return Settings(**{"steps": 100, **SETTINGS, **changes})


def run(folder, steps: int = 100, devices: int = 1, kind: str = "all") -> int:
    """What the program does, in this process: with one thread, as sums of more have another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        more = {"ema": 0.9, "clip": 10.0} if kind == "all" else {}
        return train(
            make_task(kind), make_settings(steps=steps, devices=devices, **more), folder, progress=silent
        ).steps
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    print("done", run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
