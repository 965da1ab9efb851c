"""Imports go down only: the plan of the house, checked on the syntax tree."""

import ast
import functools
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


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(tree_of(path)):
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


# root names, used by recipes and cli
ROOTS = "Box Chain Flow Invert Bijection BiLipschitz BilipError AuditRecord as_bijection audit Guard Reversible"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_imports_go_down_only(path):
    room = room_of(path)
    rooms = imported_rooms(path) - {room} - set(ROOTS.split())
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
        for node in tree_of(path).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {name} at the top"


LU = "inv inv_ex solve solve_ex lu lu_factor lu_factor_ex slogdet det tensorinv tensorsolve"
LU_OF_TORCH = {"inverse", "det", "logdet", "slogdet", "lu"}


def calls_of_lu(tree: ast.AST):
    """Lines that factor matrices through torch itself, as `torch.linalg.inv`, `torch.inverse`, `matrix.logdet()` or by import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner in ("torch.linalg", "linalg") and node.attr in LU.split()) or (
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
    found = list(calls_of_lu(tree_of(path)))
    if path.name == "_linalg.py":
        assert len(found) == 7
    else:
        assert not found, f"{path.name}, lines {found}: call bilip._linalg instead"


WAYS = ["torch.linalg.inv(a)", "f = torch.linalg.slogdet", "a.logdet()", "a.inverse()", "from torch.linalg import inv"]


@pytest.mark.parametrize("line", WAYS)
def test_other_ways_to_factor_are_seen(line):
    assert list(calls_of_lu(ast.parse(line))) == [1]
    assert not list(calls_of_lu(ast.parse("block.inverse(z); torch.linalg.svdvals(a); _linalg.inv(a)")))


# Names of torch and Python that have no public form.
TORCH = """
    _C _apply _autograd _backward_hooks _backward_pre_hooks _base _buffers _call_impl _compiled_call_impl _conv_forward
    _ConvNd _BatchNorm _cache_enabled _current_graph_task_id _current_level _DropoutNd _execution_engine _exit
    _foreach_copy_ _foreach_lerp_ _foreach_norm _forward_hooks _forward_pre_hooks _functorch
    _get_current_graph_task_keep_graph _get_default_store _getframe _global_backward_hooks _global_backward_pre_hooks
    _global_forward_hooks _global_forward_pre_hooks _modules _NormBase _parameters _reversed_padding_repeated_twice
    _schema _SpectralNorm _to_copy _top_saved_tensors_default_hooks _version _will_engine_execute_node
"""
# What a class shares with the few that it works with, and with no others.
SHARED = {
    "_context": "whether the net of a block takes a context; for its memory-saving gradient",
    "_certificate": "a held layer: what was certified last; for training steps and their states",
}


def private_names(tree: ast.AST):
    """Names with one underscore in front that are read or set on anything but `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")):
                yield node.attr


def own_names(tree: ast.AST) -> set[str]:
    """Private names that the classes of a file define or set on themselves: another object of the same class may be asked for them."""
    nodes = list(ast.walk(tree))
    found = {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "cls", "super()")
    }
    for body in (node.body for node in nodes if isinstance(node, ast.ClassDef)):
        found |= {n.name for n in body if isinstance(n, ast.FunctionDef)}
        found |= {ast.unparse(n.target) for n in body if isinstance(n, ast.AnnAssign)}
    return found


def test_private_names_are_touched_by_their_own_class():
    """Adapters read other libraries, whose private names are theirs."""
    found = {}
    for path in (p for p in FILES if room_of(p) != "adapters"):
        tree = tree_of(path)
        for name in set(private_names(tree)) - own_names(tree) - set(TORCH.split()) - set(SHARED):
            found.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    assert not found, f"{found}: ask the object for it, or write down here who shares the name"
    assert set(private_names(ast.parse("self._a; super()._b; x._c; f(x)._d; x.__dict__"))) == {"_c", "_d"}


# Filled once, while modules are imported; or weak, so that they keep nothing alive; or one for the whole process by its nature.
STATE = {
    "PROBES": "filled while modules are imported, by stating a scope",
    "RUNGS": "likewise, by stating a name",
    "_BUILDERS": "likewise, by a decorator",
    "_BORN": "weak: how classes were made",
    "_METHODS": "weak: likewise",
    "_LISTENING": "who wants to know of captured steps: one stack for the process",
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def changed_state(tree: ast.Module) -> set[str]:
    """Names of a module that its functions bind anew, or change in place."""
    names = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = set()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for function in (n for part in (tree, *classes) for n in part.body if isinstance(n, ast.FunctionDef)):
        own = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
        own |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found |= set(node.names)
            owner = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                owner = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in names - own:
                found.add(owner.id)
    return found


def test_modules_keep_no_state():
    found = {str(p.relative_to(SOURCE)): changed_state(tree_of(p)) - set(STATE) for p in FILES}
    more = {path: names for path, names in found.items() if names}
    assert not more, f"{more}: pass it as an argument, or keep it weakly and write it down here"
    assert changed_state(ast.parse("A = {}\nB = []\nC = {}\nC[1] = 2\ndef f(B):\n    A[0] = 1\n    B.append(1)")) == {
        "A"
    }
