"""Put the page that `bilip reproduce --page` writes into the site, from the results in the repository."""

from __future__ import annotations

from pathlib import Path

from mkdocs.structure.files import File, Files

from bilip.recipes.page import to_page

NAME = "reproduction.html"


def on_files(files: Files, config) -> Files:
    """Add it as a file of its own, so that links to it are checked."""
    results = Path(config.config_file_path).parent / "results"
    files.append(File.generated(config, NAME, content=to_page(results)))
    return files
