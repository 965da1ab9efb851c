"""Imports go down only: the plan of the house, checked on the syntax tree."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "bilip"
FLOORS = [
    ["errors", "_torch", "_progress", "_linalg"],
    ["bounds", "record", "_project"],
    ["data"],
    ["nets"],
    ["blocks"],
    ["linalg"],
    ["models", "adapters"],
    ["reversible"],
    ["regularizers"],
    ["objectives"],
    ["auditing"],
    ["testing"],
    ["training"],
    ["probes", "cures"],
    ["recipes", "demo"],
    ["figures"],
    ["cli", "_pytest_plugin", "demo_flows"],
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
BESIDE = {"report": {"errors", "record"}}
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
        if (
            room_of(path) in ("cli", "report", "training", "recipes", "adapters", "_pytest_plugin")
            or path.name == "fused.py"
        ):
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


LU = {
    "inv",
    "inv_ex",
    "solve",
    "solve_ex",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "slogdet",
    "det",
    "tensorinv",
    "tensorsolve",
}
LU_OF_TORCH = {"inverse", "det", "logdet", "slogdet", "lu"}


def calls_of_lu(tree: ast.AST):
    """Lines that factor matrices through torch itself, as `torch.linalg.inv`, `torch.inverse`, `matrix.logdet()` or by import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner in ("torch.linalg", "linalg") and node.attr in LU) or (
                owner == "torch" and node.attr in LU_OF_TORCH
            ):
                yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
            own = node.func.attr in LU_OF_TORCH and ast.unparse(node.func.value) != "torch"
            if own:  # of a tensor: the inverse of a bijection has an argument
                yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "torch.linalg":
            yield node.lineno
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(a.name in LU_OF_TORCH for a in node.names)
        ):
            yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_matrices_are_factored_in_one_place(path):
    """torch's own LU of several matrices is wrong on a CPU after torch.set_num_threads; `_linalg` is not."""
    found = list(calls_of_lu(ast.parse(path.read_text())))
    if path.name == "_linalg.py":
        assert len(found) == 7
    else:
        assert not found, f"{path.name}, lines {found}: call bilip._linalg instead"


WAYS = ["torch.linalg.inv(a)", "f = torch.linalg.slogdet", "a.logdet()", "a.inverse()", "from torch.linalg import inv"]


@pytest.mark.parametrize("line", WAYS)
def test_other_ways_to_factor_are_seen(line):
    assert list(calls_of_lu(ast.parse(line))) == [1]
    assert not list(calls_of_lu(ast.parse("block.inverse(z); torch.linalg.svdvals(a); _linalg.inv(a)")))
