"""`bilip bounds`: what is proved about a model, block by block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bilip.cli._ending import Streams

__all__ = ["bounds"]


def bounds(
    target: Annotated[
        str, typer.Argument(help="A checkpoint folder, or package.module:function that returns a model.")
    ],
    box: Annotated[
        tuple[float, float] | None, typer.Option(help="Prove bounds for inputs in this box, as in --box -4 4.")
    ] = None,
    latent: Annotated[tuple[float, float] | None, typer.Option(help="Start from a box of latents instead.")] = None,
    formula: Annotated[str, typer.Option(help="sharp or paper.")] = "sharp",
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print proven bounds on Lip(F) and Lip(F^-1) of a model in evaluation mode, per block and in total.

    Without a box the bounds hold everywhere; a model without a global bound then ends in an error that says so.
    """
    from bilip.auditing.subject import Subject
    from bilip.bounds import Box
    from bilip.cli._arguments import load_model, read_for, require_outputs

    require_outputs({"--out": out}, read_for(target))
    path = out and out.absolute()  # a model may change the working folder
    with Streams() as streams:
        model = Subject.of(load_model(target), target)
        domain = None if box is None else Box(*box)
        start = None if latent is None else Box(*latent)
        with Console(stderr=True).status("proving bounds ..."), model.evaluating():
            bound = model.bijection.bounds(domain, latent=start, formula=formula)
        streams.restore()
    table = Table(title=escape(f"{target}: proven Lipschitz constants, log10"), title_justify="left")
    for k, head in enumerate(("block", "kind", "Lip f", "Lip f⁻¹", "total F", "total F⁻¹", "max |box|")):
        table.add_column(head, justify="left" if k < 2 else "right")
    for row in bound.rows():
        table.add_row(*row)
    console = Console()
    try:
        console.print(table)
        console.print(repr(bound), highlight=False, markup=False)
        for remark in bound.remarks():
            console.print(remark, highlight=False, markup=False)
    finally:  # also where nobody reads on, as after `| head`
        if path is not None:
            write_json(bound, target, path)
    if path is not None:
        console.print(f"wrote {out}", highlight=False, markup=False)


def write_json(bound, target: str, path: Path) -> None:
    """The numbers of a bound, infinities as strings, whole or not at all."""
    from bilip.record import to_plain, write_aside

    document = {
        "target": target,
        "formula": bound.formula,
        "domain": repr(bound.domain),
        "image": repr(bound.image),
        "given": bound.given,
        "log_forward": bound.log_forward,
        "log_inverse": bound.log_inverse,
        "blocks": [
            {"name": b.name, "kind": b.kind, "log_forward": b.log_forward, "log_inverse": b.log_inverse}
            for b in bound.blocks
        ],
    }
    write_aside(path, json.dumps(to_plain(document), indent=2, allow_nan=False) + "\n")
