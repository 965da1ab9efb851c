"""Is the error that `Residual.solve` states ever below the true one?

Small residual blocks with every activation that has a reference here, from held and from plain layers, linear and convolutional, and
declared nets that compute in the dtype of their block or in a coarser one, in float16, bfloat16, float32 and float64; right-hand
sides from the smallest to the largest number of each dtype. The true inverse is found in 60 digits by Newton's method from the
solution, with the weights as they act, and is itself known to its residual over 1 - c: only what exceeds that counts. Activations are
torch's, so Softplus is the identity above its threshold. Writes JSON; an error above its bound, or a solution that calls itself
converged without a finite one, ends the run with exit code 1.

    python benchmarks/error_bound.py --inverses 100000 --jobs 2 --out results/soundness/error_bound.json
"""

from __future__ import annotations

import collections
import math
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import mpmath
import torch
from mpmath import mp, mpf
from torch import Tensor, nn

from _measure import Found as AnyFound
from _measure import search as search_for
from _measure import search_main
from bilip.blocks import Residual
from bilip.errors import BilipError, InputError
from bilip.nets import ConvNet, Declared, HeldLinear
from bilip.nets.activations import ScaledSwish
from bilip.nets.certify import affine_layer, flatten

DIGITS = 60
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BATCH = 32
Function = Callable[[mpf], tuple[mpf, mpf]]  # the value and a slope, which Newton's method need not know exactly


# ---- activations in 60 digits


def _exp(x: mpf) -> mpf:
    """The exponential, 0 far on the left: what is left out is below e^-5000."""
    return mp.exp(x) if x > -5000 else mpf(0)


def _sigmoid(x: mpf) -> mpf:
    return 1 / (1 + _exp(-x)) if x >= 0 else _exp(x) / (1 + _exp(x))


def _tanh(x: mpf) -> tuple[mpf, mpf]:
    y = mp.tanh(x) if abs(x) < 5000 else mp.sign(x)
    return y, 1 - y * y


def _log1p_exp(x: mpf) -> mpf:
    return mp.log1p(_exp(-abs(x))) + max(x, mpf(0))


def _softplus(module: nn.Softplus) -> Function:
    def function(x: mpf) -> tuple[mpf, mpf]:
        beta = mpf(module.beta)
        if x * beta > module.threshold:
            return x, mpf(1)
        return _log1p_exp(beta * x) / beta, _sigmoid(beta * x)

    return function


def _swish(x: mpf, beta: mpf | int = 1) -> tuple[mpf, mpf]:
    s = _sigmoid(beta * x)
    return x * s, s + beta * x * s * (1 - s) if abs(beta * x) < 5000 else s


def _scaled_swish(module: ScaledSwish) -> Function:
    beta = _log1p_exp(mpf(module.raw_beta.item()))
    return lambda x: tuple(part / mpf(1.1) for part in _swish(x, beta))  # type: ignore[return-value]


def _gelu(x: mpf) -> tuple[mpf, mpf]:
    if abs(x) > 200:
        return (x, mpf(1)) if x > 0 else (mpf(0), mpf(0))
    below = mp.erfc(-x / mp.sqrt(2)) / 2
    return x * below, below + x * mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def _gelu_tanh(x: mpf) -> tuple[mpf, mpf]:
    inner = mpf(math.sqrt(2 / math.pi)) * (x + mpf(0.044715) * x**3)
    gate, slope = _tanh(inner)
    rise = x * slope * mpf(math.sqrt(2 / math.pi)) * (1 + 3 * mpf(0.044715) * x * x)
    return x * (1 + gate) / 2, (1 + gate + rise) / 2


def _elu(alpha: float, slope: float = 1.0, rate: float = 1.0) -> Function:
    a, s, r = mpf(alpha), mpf(slope), mpf(rate)

    def function(x: mpf) -> tuple[mpf, mpf]:
        if x > 0:
            return s * x, s
        return s * a * (mp.expm1(r * x) if r * x > -5000 else mpf(-1)), s * a * r * _exp(r * x)

    return function


def _pieces(*pieces: tuple[float, float, float]) -> Function:
    """Slope and intercept from each left end on."""

    def function(x: mpf) -> tuple[mpf, mpf]:
        slope, intercept = next((mpf(a), mpf(b)) for left, a, b in reversed(pieces) if x >= left)
        return slope * x + intercept, slope

    return function


def _mish(x: mpf) -> tuple[mpf, mpf]:
    gate, slope = _tanh(_log1p_exp(x))
    return x * gate, gate + x * slope * _sigmoid(x)


def _softsign(x: mpf) -> tuple[mpf, mpf]:
    return x / (1 + abs(x)), 1 / (1 + abs(x)) ** 2


def _hardswish(x: mpf) -> tuple[mpf, mpf]:
    return (mpf(0), mpf(0)) if x <= -3 else (x, mpf(1)) if x >= 3 else (x * (x + 3) / 6, (2 * x + 3) / 6)


def reference(module: nn.Module) -> Function | None:
    """An activation in 60 digits, or `None` for one that is not known here."""
    inf = -math.inf
    if isinstance(module, nn.Softplus):
        return _softplus(module)
    if isinstance(module, ScaledSwish):
        return _scaled_swish(module)
    if isinstance(module, nn.GELU):
        return _gelu if module.approximate == "none" else _gelu_tanh
    if isinstance(module, nn.ELU):
        return _elu(module.alpha)
    if isinstance(module, nn.CELU):
        return _elu(module.alpha, rate=1 / module.alpha)
    if isinstance(module, nn.SELU):
        return _elu(1.6732632423543772848170429916717, 1.0507009873554804934193349852946)
    if isinstance(module, nn.LeakyReLU):
        return _pieces((inf, module.negative_slope, 0.0), (0.0, 1.0, 0.0))
    if isinstance(module, nn.PReLU):
        return _pieces((inf, module.weight.item(), 0.0), (0.0, 1.0, 0.0))
    simple: dict[type, Function] = {
        nn.Identity: lambda x: (x, mpf(1)),
        nn.ReLU: _pieces((inf, 0.0, 0.0), (0.0, 1.0, 0.0)),
        nn.ReLU6: _pieces((inf, 0.0, 0.0), (0.0, 1.0, 0.0), (6.0, 0.0, 6.0)),
        nn.Hardtanh: _pieces((inf, 0.0, -1.0), (-1.0, 1.0, 0.0), (1.0, 0.0, 1.0)),
        nn.Tanh: _tanh,
        nn.Sigmoid: lambda x: (_sigmoid(x), _sigmoid(x) * _sigmoid(-x)),
        nn.SiLU: _swish,
        nn.Mish: _mish,
        nn.Softsign: _softsign,
        nn.Hardswish: _hardswish,
    }
    return simple.get(type(module))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "elu": nn.ELU,
    "elu alpha": lambda: nn.ELU(0.3),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softplus beta": lambda: nn.Softplus(beta=3.0, threshold=30.0),
    "swish": nn.SiLU,
    "scaled_swish": ScaledSwish,
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU("tanh"),
    "prelu": nn.PReLU,
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "selu": nn.SELU,
    "celu": lambda: nn.CELU(0.7),
    "mish": nn.Mish,
    "softsign": nn.Softsign,
}


class Sine(nn.Module):
    """0.5 sin(3.1 x) / 3.1 in the dtype of its parameter's first owner, whatever it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside = dtype

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * torch.sin(x.to(self.inside) * 3.1) / 3.1).to(x.dtype)


# ---- the net in 60 digits


class Exact:
    """A net of affine layers and activations, in 60 digits, with the weights as they act."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        self.steps: list = []
        for layer in flatten(net):
            affine = affine_layer(layer)
            if affine is None:
                function = reference(layer)
                if function is None:
                    raise InputError(f"no reference for {layer}")
                self.steps.append(function)
                continue
            size = math.prod(shape)
            eye = torch.eye(size, dtype=torch.float64).view(size, *shape)
            images = affine.act(affine.weight, eye)  # one entry at a time: no sum is rounded
            bias = torch.zeros_like(images[0]) + (0 if affine.bias is None else affine._spread(affine.bias))
            shape = tuple(images.shape[1:])
            rows = images.flatten(1).T.tolist()
            self.steps.append(([[mpf(v) for v in row] for row in rows], [mpf(v) for v in bias.flatten().tolist()]))

    def __call__(self, x: list[mpf], slopes: bool) -> tuple[list[mpf], list[list[mpf]]]:
        """The value, and the Jacobian if asked for."""
        jac = [[mpf(i == j) for j in range(len(x))] for i in range(len(x))] if slopes else []
        for step in self.steps:
            if callable(step):
                pairs = [step(v) for v in x]
                x = [p[0] for p in pairs]
                jac = [[p[1] * v for v in row] for p, row in zip(pairs, jac, strict=True)] if slopes else []
            else:
                weight, bias = step
                x = [mp.fdot(row, x) + b for row, b in zip(weight, bias, strict=True)]
                if slopes:
                    columns = list(zip(*jac, strict=True))
                    jac = [[mp.fdot(row, column) for column in columns] for row in weight]
        return x, jac


class ExactSine:
    """What `Sine` would be without rounding."""

    def __call__(self, x: list[mpf], slopes: bool) -> tuple[list[mpf], list[list[mpf]]]:
        a = mpf(3.1)
        rows = enumerate(x) if slopes else ()
        jac = [[mp.cos(a * v) / 2 if i == j else mpf(0) for j in range(len(x))] for i, v in rows]
        return [mp.sin(a * v) / (2 * a) for v in x], jac


def invert(g: Exact | ExactSine, z: list[mpf], x: list[mpf], c: float) -> tuple[list[mpf], mpf] | None:
    """The solution of x + g(x) = z and how far it is off at most; `None` if 40 Newton and 400 plain steps do not find it."""
    for step in range(440):
        goal = mpf(10) ** -40 * (max(map(abs, (*z, *x))) + mpf(10) ** -400)
        value, jac = g(x, slopes=step < 40)
        rest = [a - b - v for a, b, v in zip(z, x, value, strict=True)]
        size = mp.norm(rest)
        if size <= goal:
            return x, size / (1 - mpf(c))
        if step < 40:
            for i in range(len(x)):
                jac[i][i] += 1
            try:
                move = mp.lu_solve(mp.matrix(jac), mp.matrix(rest))
            except ZeroDivisionError:
                move = rest
            x = [a + b for a, b in zip(x, move, strict=True)]
        else:
            x = [a + b for a, b in zip(x, rest, strict=True)]
    return None


# ---- cases


@dataclass
class Found(AnyFound):
    """What some inverses gave; `closest`: the largest share of its bound that an error takes up."""

    counted = "inverses"
    closest: float = 0.0
    inverses: int = 0
    finite: int = 0
    converged: int = 0
    by: collections.Counter = field(default_factory=collections.Counter)
    left_out: collections.Counter = field(default_factory=collections.Counter)


def block_of(
    rng: random.Random, activation: str, dtype: torch.dtype
) -> tuple[Residual, Exact | ExactSine, tuple[int, ...]]:
    """A residual block, its branch in 60 digits, and the shape of a sample."""
    size, hidden = rng.randint(1, 3), rng.randint(1, 5)
    c, loud = rng.choice((0.3, 0.9, 0.97)), 10 ** rng.uniform(-2, 3)
    kind = rng.choices(("held", "plain", "conv", "declared"), (5, 3, 1, 1))[0]
    if kind == "declared":
        inside = rng.choice([kind for kind in DTYPES if torch.finfo(kind).eps >= torch.finfo(dtype).eps])
        block = Residual(Declared(Sine(inside), lipschitz=0.5)).eval()
        return block, ExactSine(), (size,)
    if kind == "conv":
        net: nn.Module = ConvNet(1, 1, hidden=2, gain=False, lipschitz=c)
        net.layers = nn.Sequential(*(m if hasattr(m, "weight") else ACTIVATIONS[activation]() for m in net.layers))  # type: ignore[attr-defined]
        shape: tuple[int, ...] = (1, 2, 2)
    else:
        layer = (lambda i, o: HeldLinear(i, o, coefficient=math.sqrt(c))) if kind == "held" else nn.Linear
        net, shape = nn.Sequential(layer(size, hidden), ACTIVATIONS[activation](), layer(hidden, size)), (size,)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1:
                p.mul_(loud if kind != "plain" else 1.0)
            elif name.endswith("bias"):
                p.mul_(10 ** rng.uniform(-3, 2))
        if kind == "plain":  # to a product of Frobenius norms that every known slope leaves below 1
            for m in net.modules():
                if isinstance(m, nn.Linear):
                    m.weight.mul_(math.sqrt(0.7 * c) / float(m.weight.norm()))
    block = Residual(net.to(dtype)).eval()
    return block, Exact(block.g.layers if kind == "conv" else block.g, shape), shape  # type: ignore[arg-type]


def sides_of(rng: random.Random, count: int, shape: tuple[int, ...], dtype: torch.dtype, narrow: bool) -> Tensor:
    """Right-hand sides of all magnitudes of the dtype; of one magnitude if `narrow`."""
    kind = torch.finfo(dtype)
    low, high = math.log10(kind.tiny * kind.eps) + 0.5, math.log10(kind.max) - 0.01
    if rng.random() < 0.4:
        low, high = max(low, -6), min(high, 6)
    power = torch.full((count,), rng.uniform(low, high)) if narrow else torch.rand(count) * (high - low) + low
    size = (10 ** power.double()).view(-1, *[1] * len(shape))
    return (size * (torch.rand(count, *shape, dtype=torch.float64) * 2 - 1)).to(dtype)


def run(task: tuple[int, int, int]) -> Found:
    """Batch number `index` of one seed."""
    seed, index, count = task
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rng = random.Random(f"{seed}/{index}")
    torch.manual_seed(rng.randrange(2**31))
    names = sorted(ACTIVATIONS)
    activation, dtype = names[index % len(names)], DTYPES[index // len(names) % len(DTYPES)]
    found = Found()
    with mpmath.workdps(DIGITS):
        try:
            block, exact, shape = block_of(rng, activation, dtype)
        except BilipError as error:
            found.left_out[f"{activation}: {type(error).__name__}"] += count
            return found
        narrow = rng.random() < 0.3
        z = sides_of(rng, count, shape, dtype, narrow)
        options: dict = {"method": rng.choice(("anderson", "plain"))}
        if narrow and bool((z != 0).any()):
            share = 10 ** rng.uniform(math.log10(torch.finfo(dtype).eps), 0)
            options["tolerance"] = float(z.double().abs().max()) * share * 4
        try:
            solution = block.solve(z, **options)
        except BilipError as error:
            found.left_out[f"{activation}: {type(error).__name__}"] += count
            return found
        c = block.contraction()
        rows = zip(z.double().flatten(1).tolist(), solution.x.double().flatten(1).tolist(), strict=True)
        for k, (right, x) in enumerate(rows):
            bound, converged = float(solution.error_bound[k]), bool(solution.converged[k])
            found.inverses += 1
            found.finite += math.isfinite(bound)
            found.converged += converged
            found.by[f"{activation if not isinstance(exact, ExactSine) else 'declared sine'}, {dtype}"] += 1
            row = {"seed": seed, "index": index, "sample": k, "dtype": str(dtype)}
            row["net"] = str(block.g).replace("\n", " ")[:200]
            if not math.isfinite(bound):
                if converged:
                    found.findings.append({**row, "what": "converged without a finite bound"})
                continue
            true = invert(exact, [mpf(v) for v in right], [mpf(v) for v in x], c)
            if true is None:
                found.left_out["no reference found"] += 1
                continue
            error = mp.norm([mpf(a) - b for a, b in zip(x, true[0], strict=True)]) - true[1]
            found.closest = max(found.closest, float(error / mpf(bound)) if bound else 0.0)
            if error > bound:
                found.findings.append(
                    {**row, "what": "error above its bound", "error": mp.nstr(error, 6), "bound": bound, "z": right[:4]}
                )
    return found


def search(inverses: int, *, seed: int = 0, jobs: int = 1, progress=lambda found: None) -> Found:
    """Solve batches until there are so many inverses; the same ones whatever the number of processes."""
    tasks = ((seed, index, BATCH) for index in range(10**9))
    return search_for(run, tasks, Found(), inverses, jobs=jobs, progress=progress)


def describe(found: Found) -> dict:
    """What the file says."""
    return {
        "with_a_finite_bound": found.finite,
        "converged": found.converged,
        "inverses_by_net_and_dtype": dict(sorted(found.by.items())),
        "left_out": dict(found.left_out.most_common()),
        "largest_share_of_its_bound_that_an_error_takes": found.closest,
    }


if __name__ == "__main__":
    question, versions = "is the stated error of an inverse ever below the true one", {"mpmath": mpmath.__version__}
    sys.exit(
        search_main("inverses", question, __doc__, "results/soundness/error_bound.json", search, describe, versions)
    )
