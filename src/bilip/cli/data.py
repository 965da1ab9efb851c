"""`bilip data`: an image set, verified and made ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["data"]


def data(
    name: Annotated[str | None, typer.Argument(help="The set; without one, what there is.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="The folder that holds it; without one it is fetched from Hugging Face."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Where it goes, in a folder of its name: BILIP_DATA or .data.")
    ] = None,
) -> None:
    """Read an image set in any of its usual forms, verify it, and keep it where recipes and audits find it."""
    from bilip.data import IMAGE_SETS, data_folder, prepare_images

    console = Console(highlight=False, soft_wrap=True)
    if name is None:
        table = Table(box=None)
        for head in ("set", "is", "images", "here"):
            table.add_column(head)
        for each in IMAGE_SETS.values():
            counts = ", ".join(f"{count:,} {split}" for split, count in each.counts.items())
            here = "yes" if (data_folder(to) / each.name / "set.json").exists() else ""
            table.add_row(each.name, f"{each.title}, {each.side} x {each.side}", counts, here)
        console.print(table)
        return
    facts = prepare_images(name, source, to)
    for split, found in facts["splits"].items():
        whole = "all of them" if found["count"] == found["of"] else f"a part of {found['of']:,}"
        sums = {True: ", checksums as published", False: ", checksums known, and different", None: ""}[
            found["checksums"]
        ]
        console.print(f"{name} {split}: {found['count']:,} images, {whole}{sums} ({found['from']})", markup=False)
    console.print(f"wrote {data_folder(to) / name}", markup=False)
