"""Memory-saving gradients equal stored ones, for every block, in both directions, in ordinary autograd and to any order."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bilip
from bilip import Chain, blocks, models, nets
from bilip.errors import DriftError
from bilip.regularizers import FiniteDifference
from bilip.reversible import Guard, Reversible, angle
from bilip.reversible.function import hold
from catalogue import CATALOGUE, overflowing, squash, wake
from recorded import play_graphs_on_the_cpu

IDS = [e.name for e in CATALOGUE]


def loss_of(method, point, context):
    value, log_det = method(point, context)
    weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).view_as(value)
    return (weights * value.sin()).sum() + (log_det * torch.arange(1.0, len(log_det) + 1).to(log_det)).sum()


def gradients(model, bijection, x, context, *, inverse):
    point = x.clone().requires_grad_()
    given = None if context is None else context.clone().requires_grad_()
    method = model.inverse_and_log_det if inverse else model.forward_and_log_det
    leaves = [point, *([] if given is None else [given]), *(p for p in bijection.parameters() if p.requires_grad)]
    found = torch.autograd.grad(loss_of(method, point, given), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def prepared(entry, device, inverse):
    model = wake(entry.make()).double().eval().to(device)
    x, context = entry.batch().to(device), entry.contexts()
    context = None if context is None else context.to(device)
    with torch.no_grad():
        x = model(x, context) if inverse else x
    return model, x, context


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_checkpointed_gradients_are_the_stored_ones(entry, inverse, device):
    """Those of a walk are held against stored ones by the contract, for the whole catalogue."""
    model, x, context = prepared(entry, device, inverse)
    reversible = Reversible(model, memory="checkpoint")
    stored = gradients(model, model, x, context, inverse=inverse)
    found = gradients(reversible, model, x, context, inverse=inverse)
    scale = max(float(g.abs().max()) for g in stored)
    # an iterative inverse is known to its own tolerance
    tolerance = 1e-10 if model.closed_form or not inverse else 1e-7
    for a, b in zip(stored, found, strict=True):
        assert float((a - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_the_same_numbers(entry, device):
    model, x, context = prepared(entry, device, False)
    reversible = Reversible(model)
    for f in (model, reversible):
        assert f(x, context).shape == x.shape[:1] + tuple(model.out_shape(x.shape[1:]))
    for _ in range(2):  # the first call is made in another way
        for a, b in zip(model.forward_and_log_det(x, context), reversible.forward_and_log_det(x, context), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("levels", [3, 4])
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_factor_outs_nest_to_any_depth(levels, inverse, device):
    torch.manual_seed(0)
    model = wake(models.glow((3, 16, 16), levels=levels, blocks=1, hidden=4, factor_out=True), 0.1).double().to(device)
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64, device=device)
    x = model(x).detach() if inverse else x
    stored, saving = gradients(model, model, x, None, inverse=inverse), Reversible(model)
    for _ in range(3):
        assert angle(gradients(saving, model, x, None, inverse=inverse), stored) < 1e-7
    assert saving.report().repaired == 0


def glow():
    torch.manual_seed(0)
    return wake(models.glow((3, 8, 8), levels=2, blocks=2, hidden=8), 0.1).double()


def check_agreement(model, loss):
    """`loss(f)` gives the parameters the same gradients stored and through Reversible; those of the latter are left in them."""
    found = []
    for f in (model, Reversible(model)):
        model.zero_grad()
        loss(f).backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("log_det", [False, True])
def test_outputs_without_log_det(log_det):
    model, x = glow(), torch.rand(4, 3, 8, 8, dtype=torch.float64)
    check_agreement(model, lambda f: f.forward_and_log_det(x)[1].sum() if log_det else f(x).square().sum())


def test_accumulation_several_calls_repeated_backward_and_hooks():
    model, x = glow(), torch.rand(4, 3, 8, 8, dtype=torch.float64)
    reversible = Reversible(model)
    seen = []
    first = next(model.parameters())
    first.register_hook(lambda g: seen.append(g.clone()))

    def total(f):
        a, b = f.forward_and_log_det(x)
        c, d = f.forward_and_log_det(x.flip(0))
        back = f.inverse(a)
        return a.square().mean() - b.mean() + c.abs().mean() + d.mean() * 0.3 + back.sin().sum()

    loss = total(reversible)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))
    assert seen
    model.zero_grad()
    total(model).backward()
    assert all(torch.allclose(p.grad, g, rtol=1e-8, atol=1e-10) for p, g in zip(model.parameters(), once, strict=True))


def test_frozen_parameters_get_no_gradient():
    model, x = glow(), torch.rand(4, 3, 8, 8, dtype=torch.float64)
    frozen = list(model.parameters())[::3]
    for p in frozen:
        p.requires_grad_(False)
    check_agreement(model, lambda f: f(x).square().sum())
    assert all(p.grad is None for p in frozen)


def test_shared_parameters_add_up():
    block = blocks.AdditiveCoupling(nets.MLP(2, 2))
    chain = Chain(block, blocks.Permutation.reverse(4), block, shape=(4,)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    check_agreement(chain, lambda f: f(x).square().sum())


def test_nesting():
    inner = models.real_nvp(4, blocks=3).double()
    outer = Chain(
        blocks.Permutation.reverse(4), Reversible(inner), blocks.AdditiveCoupling(nets.MLP(2, 2)), shape=(4,)
    ).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    check_agreement(outer, lambda f: f.forward_and_log_det(x)[0].square().sum())


def noisy_chain():
    torch.manual_seed(1)

    def net():
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))

    parts = [
        p for _ in range(4) for p in (blocks.AffineCoupling(net(), scale="half_sigmoid"), blocks.Permutation.reverse(4))
    ]
    return Chain(*parts, shape=(4,)).double().train()


@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_dropout_and_batch_norm_as_in_a_stored_run(memory):
    stored, saving = noisy_chain(), noisy_chain()
    x = torch.randn(32, 4, dtype=torch.float64)
    results = []
    for model, wrapped in ((stored, stored), (saving, Reversible(saving, memory=memory))):
        torch.manual_seed(5)
        z, log_det = wrapped.forward_and_log_det(x)
        (z.square().sum() - log_det.sum()).backward()
        results.append((z.detach(), torch.rand(3), [p.grad for p in model.parameters()], dict(model.named_buffers())))
    (z1, r1, g1, b1), (z2, r2, g2, b2) = results
    assert torch.allclose(z1, z2)
    assert torch.equal(r1, r2)  # the generator is where a stored run leaves it
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(g1, g2, strict=True))
    assert all(torch.allclose(b1[name], b2[name]) for name in b1)


def test_double_backward_and_torch_func_take_the_stored_path():
    model, x = models.real_nvp(4, blocks=3, activation="elu").double(), torch.randn(3, 4, dtype=torch.float64)
    reversible = Reversible(model)

    def penalty(f, x):
        x = x.clone().requires_grad_()
        z, log_det = f.forward_and_log_det(x)
        (g,) = torch.autograd.grad(z.square().sum() - log_det.sum(), x, create_graph=True)
        g.square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    assert all(
        torch.allclose(a, b, rtol=1e-8, atol=1e-10)
        for a, b in zip(penalty(model, x), penalty(reversible, x), strict=True)
    )
    assert torch.allclose(torch.func.jacrev(reversible)(x), torch.func.jacrev(model)(x))
    jvp = torch.func.jvp(reversible, (x,), (torch.ones_like(x),))[1]
    assert torch.allclose(jvp, torch.func.jvp(model, (x,), (torch.ones_like(x),))[1])
    assert torch.autograd.gradgradcheck(lambda y: reversible(y), (x.requires_grad_(),), fast_mode=True)


def test_autocast_keeps_the_state_in_float32(device):
    torch.manual_seed(0)
    model = wake(models.glow((3, 8, 8), levels=1, blocks=4, hidden=16), 0.05).to(device)
    x = torch.rand(16, 3, 8, 8, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    try:
        with torch.autocast(device.type, dtype=dtype):
            nn.functional.conv2d(torch.rand(1, 1, 4, 4, device=device), torch.rand(1, 1, 3, 3, device=device))
    except RuntimeError as error:
        pytest.skip(f"no half-precision convolution here: {error}")
    found = []
    for wrapped in (model, Reversible(model)):
        model.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            z, log_det = wrapped.forward_and_log_det(x)
            assert z.dtype == torch.float32
            loss = z.square().sum() / 2 - log_det.sum()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert angle(*found) < 1e-3
    names = [name for name, _ in model.named_parameters()]
    mixed = [
        k
        for k, name in enumerate(names)
        if isinstance(model.get_submodule(name.rpartition(".")[0]), blocks.InvertibleConv1x1)
    ]
    assert mixed
    assert max(angle([found[0][k]], [found[1][k]]) for k in mixed) < 1e-5  # no 16 bits outside of the nets


def test_compiled_nets():
    model = models.real_nvp(4, blocks=2).double()
    for block in model:
        if isinstance(block, blocks.AffineCoupling):
            block.t = torch.compile(block.t, backend="eager")
    x = torch.randn(5, 4, dtype=torch.float64)
    check_agreement(model, lambda f: f(x).square().sum())


def test_foreign_models():
    pytest.importorskip("FrEIA")
    import stacks

    torch.manual_seed(0)
    for model in (stacks.freia("NICECouplingBlock", 4), stacks.zuko_real_nvp(3), stacks.nflows_spline(2)):
        model = model.double()
        bijection = bilip.as_bijection(model)
        x = torch.randn(6, 8, dtype=torch.float64)
        stored = gradients(bijection, model, x, None, inverse=False)
        found = gradients(Reversible(model), model, x, None, inverse=False)
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(stored, found, strict=True))


def test_actnorm_starts_from_data_through_reversible():
    model = models.glow((3, 8, 8), levels=1, blocks=2, hidden=8).double().train()
    twin = copy.deepcopy(model)
    x = torch.rand(8, 3, 8, 8, dtype=torch.float64)
    for wrapped in (Reversible(model), twin):
        wrapped.forward_and_log_det(x)[0].square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q)
        assert torch.allclose(p.grad, q.grad, rtol=1e-8, atol=1e-10)


def test_guard_none_is_the_bare_walk_and_has_no_report():
    reversible = Reversible(models.real_nvp(4, blocks=2), guard=None)
    reversible(torch.randn(3, 4)).sum().backward()
    with pytest.raises(bilip.errors.InputError, match="guard=None"):
        reversible.report()


def test_bad_input():
    with pytest.raises(bilip.errors.InputError, match="memory"):
        Reversible(models.real_nvp(4), memory="small")
    with pytest.raises(bilip.errors.InputError, match="has no inverse"):
        Reversible(nn.Linear(2, 2))
    with pytest.raises(bilip.errors.InputError, match="float32 rounds at"):
        Reversible(models.real_nvp(4), Guard(tolerance=1e-9))(torch.randn(3, 4))
    with pytest.raises(bilip.errors.InputError, match="action"):
        Guard(action="hope")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda f, x: f(x, (x, x)),
        lambda f, x: f(x, [1.0]),
        lambda f, x: f.forward_and_log_det(x, x.numpy()),
        lambda f, x: Guard(tolerance="small"),
        lambda f, x: Guard(budget=None),
        lambda f, x: Guard(budget=float("nan")),
        lambda f, x: Guard(spot_check=0.5),
        lambda f, x: hold(f(x), "a tenth"),
        lambda f, x: hold(f(x), torch.tensor([0.1, 0.2])),
        lambda f, x: hold(None, 0.1),
    ],
)
def test_what_is_no_tensor_or_number_is_named(mistake):
    with pytest.raises(bilip.errors.InputError, match="expected"):
        mistake(Reversible(models.real_nvp(4, blocks=2)), torch.randn(3, 4))


def test_an_input_changed_in_place_is_noticed():
    reversible, x = Reversible(models.real_nvp(4, blocks=2)), torch.randn(3, 4)
    loss = reversible(x).square().sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.numeric
def test_functional_call():
    model, x = models.real_nvp(4, blocks=2).double(), torch.randn(5, 4, dtype=torch.float64)
    wrapped = Reversible(model)
    for values in (
        {k: v.detach().clone().requires_grad_() for k, v in wrapped.named_parameters()},
        {k: nn.Parameter(1.001 * v.detach()) for k, v in wrapped.named_parameters()},
    ):
        loss = torch.func.functional_call(wrapped, values, (x,)).square().sum()
        try:
            loss.backward()
        except DriftError:
            continue
        assert all(v.grad is not None and v.grad.any() for v in values.values())


@pytest.mark.numeric
def test_an_empty_batch():
    assert Reversible(models.real_nvp(4))(torch.randn(0, 4)).shape == (0, 4)


def test_parameters_without_a_shape_yet_are_stored_once():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.LazyLinear(8), nn.ELU(), nn.Linear(8, 4)) for _ in range(2)]
    chain = Chain(*(blocks.AffineCoupling(net, partition=blocks.Split(swap=k == 1)) for k, net in enumerate(nets)))
    f, x = Reversible(chain), torch.randn(8, 4)
    for _ in range(2):
        a = torch.autograd.grad(f(x).square().sum(), list(chain.parameters()))
        b = torch.autograd.grad(chain(x).square().sum(), list(chain.parameters()))
        assert angle(list(a), list(b)) < 1e-5
    assert f.report().steps == 1


def smooth(seed=0):
    torch.manual_seed(seed)
    model = models.real_nvp(4, blocks=3, hidden=(8,), activation="tanh").double()
    return model, Reversible(model), torch.randn(8, 4, dtype=torch.float64)


def same(found):
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_inputs_that_depend_on_the_same_parameters():
    model, saving, x = smooth()
    found = []
    for f in (model, saving):
        loss = (f.inverse(f(x) + 0.1) - x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    same(found)
    assert angle(*found) < 1e-7


@pytest.mark.parametrize("log_det", [False, True])
def test_third_derivatives_through_a_cycle(log_det):
    model, saving, x = smooth()
    found = []
    for f in (model, saving):
        y = x.clone().requires_grad_()
        if log_det:
            z, log = f.forward_and_log_det(y)
            value = f.inverse(2 * z).sin().sum() + log.square().sum()
        else:
            value = f.inverse(2 * f(y)).sin().sum()
        (first,) = torch.autograd.grad(value, y, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(second.square().sum(), [y, *model.parameters()], allow_unused=True))
    same(found)


def test_contexts_that_depend_on_the_same_parameters():
    torch.manual_seed(0)
    net = nets.MLP(2, 2, hidden=(8,), activation="tanh", context=4)
    model = Chain(blocks.AdditiveCoupling(net), shape=(4,)).double()
    x, found = torch.randn(5, 4, dtype=torch.float64), []
    for f in (model, Reversible(model)):
        z = f(f(x, x), f(x, x.cos()))
        first = torch.autograd.grad(z.square().sum(), list(model.parameters()), create_graph=True)
        found.append(
            torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()), allow_unused=True)
        )
    same(found)


def test_a_penalty_on_outputs_that_overflow_runs_backward():
    """The stored path must not differentiate what its input has behind it: that was done, and is freed."""
    model, x = overflowing()
    saving = Reversible(model)
    for _ in range(2):
        z, log_det = saving.forward_and_log_det(x)
        loss = z.square().sum() - log_det.sum()
        with pytest.warns(UserWarning, match="NaN or Inf"):
            loss = loss + FiniteDifference(0.1)(saving, x, latent=(z, log_det), step=0)
        loss.backward()
    back = saving(x)
    (saving.inverse(back).nan_to_num().sum() + log_det.detach().sum()).backward()


# ---- in loops of one's own: two processes with half a batch each, and a captured step as docs/reversible.md has it, on a CPU played


def images():
    return torch.rand(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Loss(torch.nn.Module):
    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        z, log_det = self.flow.forward_and_log_det(x)
        return (z.flatten(1).square().sum(1) / 2 - log_det).mean()


def half(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        model, x = glow(), images()
        parallel = DistributedDataParallel(Loss(Reversible(model)))
        for _ in range(2):  # twice: the second pass is that of a training run under way
            model.zero_grad()
            parallel(x.chunk(2)[rank]).backward()
        torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
@pytest.mark.process
@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path):
    model, x = glow(), images()
    Loss(model)(x).backward()
    stored = [p.grad for p in model.parameters()]
    torch.multiprocessing.spawn(half, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    scale = max(float(g.abs().max()) for g in stored)
    for a, b in zip(first, stored, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * scale


MODELS = {
    "vectors": ((4,), lambda: models.real_nvp(4, blocks=6)),
    "images": ((2, 4, 4), lambda: models.glow((2, 4, 4), levels=1, blocks=3, hidden=8)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_replayed_gradients_and_the_flag(name, device, monkeypatch):
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
    shape, build = MODELS[name]
    trunk = build().to(device)
    trunk(torch.randn(16, *shape, device=device))  # ActNorms look at their first batch
    saving, x = Reversible(trunk), torch.empty(16, *shape, device=device)

    def gradients(f=saving):
        z, log_det = f.forward_and_log_det(x)
        (z.flatten(1).square().sum(1) / 2 - log_det).mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.normal_()
            gradients()
    torch.cuda.current_stream().wait_stream(side)
    trunk.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()
    flag, couplings = saving.drift_flag(), [part for part in trunk if hasattr(part, "t")]
    coupling = couplings[len(couplings) // 2]

    def apart():
        """From the stored gradients of the same batch."""
        twin = copy.deepcopy(trunk)
        twin.zero_grad(set_to_none=True)
        gradients(twin)
        pairs = [
            (p.grad, q.grad) for p, q in zip(trunk.parameters(), twin.parameters(), strict=True) if q.grad is not None
        ]
        return angle(*zip(*pairs, strict=True))

    for sigma in (None, None, 1e-9):
        if sigma:
            squash(coupling, sigma)  # in place, which the graph sees
        x.normal_()
        flag.zero_()
        graph.replay()
        assert (float(flag) > 1) == bool(sigma)
        if sigma:
            assert apart() > 1e-2
            flag.zero_()
            trunk.zero_grad(set_to_none=False)
            gradients()
        assert apart() < 1e-3
    assert saving.report().repaired == 1


@pytest.mark.parametrize("name", ["real_nvp", "glow"])
def test_many_gradients_at_once(name):
    torch.manual_seed(0)
    model = models.real_nvp(4, blocks=3) if name == "real_nvp" else models.glow((2, 4, 4), levels=1, blocks=2, hidden=4)
    x = torch.randn(2, 4) if name == "real_nvp" else torch.randn(2, 2, 4, 4)
    z = model(x).detach()  # starts ActNorm
    saving = Reversible(model)
    for f, plain, given in ((saving, model, x), (saving.inverse, model.inverse, z)):
        expected = torch.autograd.functional.jacobian(plain, given)
        found = torch.autograd.functional.jacobian(f, given, vectorize=True)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    y = x.clone().requires_grad_()
    inputs, found = [y, *model.parameters()], []
    for f in (model, saving):
        z, log_det = f.forward_and_log_det(y)
        grads = (torch.ones(3, *z.shape), torch.arange(6.0).view(3, 2))
        found.append(torch.autograd.grad((z, log_det), inputs, grads, is_grads_batched=True, allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-4)
