"""How much an audit may cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from bilip.errors import InputError

__all__ = ["BUDGETS", "Budget", "budget_named"]


@dataclass(frozen=True)
class Budget:
    """How much an audit may cost. Each probe takes from it what it needs: see `Probe.cost`.

    Attributes:
        samples: Largest number of samples of each source; `None` for all. Fewer are read once the allowed share is decided.
        batch: Samples in one batch.
        noise: Samples of each source of noise.
        draws: Largest number of samples drawn from the model.
        walk: Samples followed block by block.
        spectra: Samples whose Jacobian is taken.
        exact: Largest dimension for whole spectra.
        steps: Lanczos steps for larger ones.
        attack: Samples attacked; 0 leaves the attack out.
        attack_steps: Steps of the attack.
        precision: Samples computed in each floating-point format; 0 leaves it out.
        repeats: Repeated round trips.
        gradients: Samples whose memory-saving gradients are compared with stored ones; 0 leaves them out.
        bad_share: Share of bad samples that is allowed, where `Thresholds` name none.
        referenced: Samples whose float64 reference is computed although nothing looks wrong, where the model is large; `None` for all.
        log_dets: Samples whose log-determinant is held against the Jacobian.

    Example:
        >>> from dataclasses import replace
        >>> replace(BUDGETS["quick"], samples=64, bad_share=0.1).noise
        2560
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
    _: KW_ONLY
    bad_share: float = 0.001
    referenced: int | None = 256
    log_dets: int = 4


BUDGETS = {
    "quick": Budget(
        samples=2560,
        batch=256,
        noise=2560,
        draws=2560,
        walk=32,
        spectra=2,
        exact=64,
        steps=30,
        attack=4,
        attack_steps=12,
        precision=16,
        repeats=4,
        gradients=32,
        bad_share=0.01,
        referenced=64,
        log_dets=2,
    ),
    "standard": Budget(
        samples=25_600,
        batch=256,
        noise=25_600,
        draws=25_600,
        walk=64,
        spectra=4,
        exact=256,
        steps=80,
        attack=8,
        attack_steps=200,
        precision=128,
        repeats=10,
        gradients=128,
    ),
    "thorough": Budget(
        samples=None,
        batch=256,
        noise=102_400,
        draws=102_400,
        walk=256,
        spectra=16,
        exact=3072,
        steps=200,
        attack=32,
        attack_steps=200,
        precision=512,
        repeats=10,
        gradients=256,
        referenced=None,
        log_dets=16,
    ),
}


def budget_named(name: str) -> Budget:
    """One of `BUDGETS` by its name."""
    if name not in BUDGETS:
        raise InputError(f"audit(budget={name!r}): expected {', '.join(map(repr, BUDGETS))} or a Budget.")
    return BUDGETS[name]
