"""Imports go down only: the plan of the house, checked on the syntax tree."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "bilip"
FLOORS = [
    ["errors", "_capture"],
    ["bounds", "record"],
    ["data"],
    ["nets"],
    ["blocks"],
    ["models", "adapters"],
    ["demo_flows"],
    ["reversible"],
    ["regularizers"],
    ["objectives"],
    ["auditing"],
    ["probes", "testing"],
    ["training"],
    ["recipes"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
BESIDE = {"report": {"errors", "record"}, "figures": {"errors", "record"}}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or not p.name.startswith("__"))


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "bilip" else [f"bilip.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("bilip.")}
    return rooms


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_imports_go_down_only(path):
    room = room_of(path)
    roots = {
        "Box",
        "Chain",
        "Flow",
        "Invert",
        "Bijection",
        "BiLipschitz",
        "BilipError",
        "AuditRecord",
        "as_bijection",
        "audit",
        "Guard",
        "Reversible",
    }  # root names, used by recipes and cli
    rooms = imported_rooms(path) - {room} - roots
    if room in BESIDE:
        assert rooms <= BESIDE[room] | {"cli"} - {"cli"}
        return
    assert room in LEVEL, f"{room} has no floor: add it to the plan"
    too_high = {other for other in rooms if LEVEL.get(other, -1 if other in BESIDE else 99) >= LEVEL[room]}
    assert not too_high, f"{path.name} imports {too_high}"


def test_light_core():
    """The core needs torch, numpy and scipy; everything else is imported where it is used, as is the file with kernels for GPUs."""
    allowed = {"torch", "numpy", "scipy", "bilip"}
    import sys

    for path in FILES:
        if room_of(path) in ("cli", "report", "figures", "training", "recipes", "adapters") or path.name == "fused.py":
            continue
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {name} at the top"
