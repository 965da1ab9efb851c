"""`bilip demo`: three small flows, side by side."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

__all__ = ["demo"]


def demo() -> None:
    """Prove bounds for three small flows and say what they mean."""
    import torch

    from bilip import Box, models
    from bilip.errors import NoGlobalBound

    torch.manual_seed(0)
    flows = {
        "additive, held nets": models.real_nvp(8, blocks=8, coupling="additive", lipschitz=0.5),
        "additive": models.real_nvp(8, blocks=8, coupling="additive"),
        "affine": models.real_nvp(8, blocks=8, coupling="affine", hidden=(16,)),
    }
    table = Table(title="Proven bound on Lip(F⁻¹), eight coupling blocks on R⁸", title_justify="left")
    for head in ("flow", "on R⁸", "[-1,1]⁸", "[-4,4]⁸", "[-16,16]⁸", "> 1/eps at"):
        table.add_column(head, justify="left" if head == "flow" else "right", no_wrap=True)
    for name, model in flows.items():
        try:
            everywhere = _power(model.bounds().log_inverse)
        except NoGlobalBound:
            everywhere = "none"
        local = [model.bounds(Box(-side, side)) for side in (1, 4, 16)]
        beyond = local[1].first_beyond_precision()
        block = "never" if beyond is None else f"block {beyond.name}"
        table.add_row(name, everywhere, *(_power(bound.log_inverse) for bound in local), block)
    console = Console()
    console.print(table)
    console.print(
        "Lip(F⁻¹) is how much the inverse may magnify a rounding error. Additive\n"
        "coupling has one constant for all inputs, and holding its nets makes it small.\n"
        "Affine coupling has none: its bound grows with the box (last column: on\n"
        "[-4,4]⁸), and past 1/eps = 8.4e+06 nothing rules out that a float32\n"
        "reconstruction is all error.\n\n"
        "Next, for a model of yours:  bilip bounds my_module:my_model --box -4 4",
        highlight=False,
        markup=False,
    )


def _power(log: float) -> str:
    if math.isinf(log):
        return "+inf"
    power = log / math.log(10)
    return f"{math.exp(log):.3g}" if power < 4 else f"10^{power:.3g}"
