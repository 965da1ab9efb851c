"""Three small trained flows on the 2-D checkerboard, for trying things out, and what `bilip demo` does with them.

They differ in one thing, and so do their inverses: affine coupling with a scale in (0, 1), affine coupling with a scale
in (0.5, 1), and residual blocks held to the constant 0.8. `benchmarks/train_demo.py` trains them; `trained.json` in
each folder says how, and what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

from bilip._progress import Progress, silent
from bilip.errors import InputError

if TYPE_CHECKING:
    from bilip.blocks import Flow
    from bilip.cures import Cure
    from bilip.record import AuditRecord, Measurement

__all__ = ["NAMES", "Demo", "how_trained", "load_demo_flow", "run_demo"]

NAMES = ("affine_sigmoid", "affine_half", "residual")
TITLES = {
    "affine_sigmoid": "affine (0, 1)",
    "affine_half": "affine (0.5, 1)",
    "residual": "residual 0.8",
}
ABOUT = {
    "affine_sigmoid": "20 affine coupling blocks whose scale lies in (0, 1): it may come close to 0, and the inverse divides by it.",
    "affine_half": "The same blocks with a scale in (0.5, 1): the inverse never divides by less than a half.",
    "residual": "Residual blocks whose branches are held to a Lipschitz constant of 0.8, with a proof.",
}
BROKEN, CURED = "affine_sigmoid", "affine (0, 1), cured"


def load_demo_flow(name: str) -> Flow:
    """One of the flows, float32, in evaluation mode.

    Example:
        >>> flow = load_demo_flow("affine_half")
        >>> flow.sample(3).shape
        torch.Size([3, 2])
    """
    from bilip.models import load

    with as_file(files(__name__) / _known(name)) as folder:
        return load(folder).eval()


def how_trained(name: str) -> dict[str, Any]:
    """Command, seed, test likelihood and measured reconstruction errors of one of the flows.

    Example:
        >>> how_trained("residual")["seed"]
        0
    """
    return json.loads((files(__name__) / _known(name) / "trained.json").read_text())


def _known(name: str) -> str:
    if name not in NAMES:
        raise InputError(f"there is no demo flow {name!r}; there are {', '.join(NAMES)}.")
    return name


@dataclass(frozen=True)
class Demo:
    """What `run_demo` found.

    Attributes:
        records: The audits of the three flows by title, and after the first that of the cured one, where the cure holds.
        cure: What was tried on the flow that does not give all of its inputs back.
    """

    records: dict[str, AuditRecord]
    cure: Cure

    @property
    def broken(self) -> AuditRecord:
        """The audit of the flow that the cure is for."""
        return self.records[TITLES[BROKEN]]


def run_demo(budget: str = "quick", progress: Progress | None = None) -> Demo:
    """Audit the three flows on fresh data and on uniform noise around it, and cure the one that breaks there.

    Args:
        budget: Of each audit: `"quick"`, `"standard"` or `"thorough"`.
        progress: Called with what is going on and the share of the work that is done.
    """
    steps, tell = len(NAMES) + 1, progress or silent

    def follow(k: int, name: str) -> Progress:
        def show(text: str, share: float) -> None:
            tell(f"{name}: {text}", (k + share) / steps)

        return show

    records = {TITLES[name]: _audit(name, budget, follow(k, name)) for k, name in enumerate(NAMES)}
    result = _cure(budget, follow(len(NAMES), "cure"))
    if result.cured and result.after is not None:
        about = {"name": CURED, "description": f"The first flow, cured: {result.done}."}
        seen = (*result.after.measurements, *_map_of(result.model, budget))
        cured = replace(result.after, measurements=seen, model={**result.after.model, **about})
        first, *others = records.items()
        records = dict([first, (CURED, cured), *others])
    return Demo(records, result)


def _map_of(model: Any, budget: str) -> Sequence[Measurement]:
    """The map of errors, which a cure does not need and the page shows."""
    import bilip
    from bilip.data import checkerboard

    data = {"checkerboard": checkerboard(2000, seed=1)}
    return bilip.audit(model, data, ood=["uniform:2"], probes=["map"], budget=budget).measurements


def _audit(name: str, budget: str, progress: Progress) -> AuditRecord:
    import bilip
    from bilip.data import Source, checkerboard
    from bilip.data.rows import TensorRows

    about = "2,000 fresh points of the checkerboard on [-4, 4]² that the flows were trained on"
    sources = {"checkerboard": Source("checkerboard", TensorRows(checkerboard(2000, seed=1)), description=about)}
    return bilip.audit(
        load_demo_flow(name),
        sources,
        ood=["uniform:2"],
        budget=budget,
        name=TITLES[name],
        description=ABOUT[name],
        command=f"bilip demo --budget {budget}",
        progress=progress,
    )


def _cure(budget: str, progress: Progress) -> Cure:
    import bilip
    from bilip.data import checkerboard

    return bilip.cure(
        load_demo_flow(BROKEN),
        {"checkerboard": checkerboard(2000, seed=1)},
        ood=["uniform:2"],
        uses=["ood-inversion"],
        train=checkerboard(20_000, seed=2),
        steps=100,
        budget=budget,
        progress=progress,
    )
