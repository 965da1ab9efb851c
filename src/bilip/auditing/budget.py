"""How much an audit may cost."""

from __future__ import annotations

from dataclasses import dataclass

from bilip.errors import InputError

__all__ = ["BUDGETS", "Budget", "budget_named"]


@dataclass(frozen=True)
class Budget:
    """How much an audit may cost.

    Attributes:
        samples: Samples of each source; `None` for all.
        batch: Samples in one batch.
        noise: Samples of each source of noise.
        draws: Samples drawn from the model.
        walk: Samples followed block by block.
        spectra: Samples whose Jacobian is taken.
        exact: Largest dimension for whole Jacobians.
        steps: Lanczos steps for larger ones.
        attack: Samples attacked; 0 leaves the attack out.
        attack_steps: Steps of the attack.
        precision: Samples on the precision ladder; 0 leaves it out.
        repeats: Repeated round trips.
        gradients: Samples whose memory-saving gradients are compared with stored ones; 0 leaves them out.
    """

    samples: int | None
    batch: int
    noise: int
    draws: int
    walk: int
    spectra: int
    exact: int
    steps: int
    attack: int
    attack_steps: int
    precision: int
    repeats: int
    gradients: int


BUDGETS = {
    "quick": Budget(512, 256, 512, 256, 32, 2, 64, 30, 4, 12, 32, 4, 32),
    "standard": Budget(4096, 256, 2048, 1024, 64, 4, 256, 80, 8, 200, 128, 10, 128),
    "thorough": Budget(None, 256, 10_000, 4096, 256, 16, 3072, 200, 32, 200, 512, 10, 256),
}


def budget_named(name: str) -> Budget:
    """One of `BUDGETS` by its name."""
    if name not in BUDGETS:
        raise InputError(f"audit(budget={name!r}): expected {', '.join(map(repr, BUDGETS))} or a Budget.")
    return BUDGETS[name]
