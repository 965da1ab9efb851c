import copy
import math
import pickle

import pytest
import torch

from bilip import Box, blocks
from bilip.blocks import ActNorm, Chain, DiagonalScaling, InvertibleConv1x1, Permutation
from bilip.errors import InputError, NoGlobalBound, NonFiniteParameters, NotInitialized, PartitionError
from bilip.nets import HeldLinear, matrix_norm

pytestmark = pytest.mark.numeric


def test_actnorm_starts_from_the_first_training_batch():
    block = ActNorm(3)
    x = torch.randn(64, 3, 4, 4) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1) + 7
    z = block(x)
    assert torch.allclose(z.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(z.std((0, 2, 3)), torch.ones(3), atol=1e-3)
    before = block.bias.clone()
    block(x + 100)
    assert torch.equal(before, block.bias)  # once only


def test_actnorm_state_travels_with_the_state_dict():
    source = ActNorm(2)
    source(torch.randn(8, 2))
    copied = ActNorm(2)
    copied.load_state_dict(source.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(copied(x * 50), source(x * 50))  # no second start
    fresh = ActNorm(2)
    source.load_state_dict(fresh.state_dict())
    with pytest.raises(NotInitialized):
        source.inverse(x)
    assert copy.deepcopy(copied).ready


@pytest.mark.parametrize("call", ["inverse", "inverse_and_log_det", "bounds", "eval forward"])
def test_an_uninitialised_actnorm_says_what_to_do(call):
    block = ActNorm(2)
    x = torch.randn(4, 2)
    with pytest.raises(NotInitialized, match=r"Pass one batch through the model in training mode"):
        if call == "bounds":
            block.bounds()
        elif call == "eval forward":
            block.eval()(x)
        else:
            getattr(block, call)(x)


def test_actnorm_refuses_batches_it_cannot_start_from():
    with pytest.raises(InputError, match="single value"):
        ActNorm(2)(torch.ones(1, 2))
    with pytest.raises(InputError, match="NaN or Inf"):
        ActNorm(1)(torch.tensor([[1.0], [torch.nan]]))


@pytest.mark.parametrize("kind", ["full", "plu", "orthogonal"])
def test_conv1x1_kinds(kind):
    block = InvertibleConv1x1(6, kind=kind)
    x = torch.randn(3, 6, 5, 5)
    assert torch.allclose(block.inverse(block(x)), x, atol=1e-5)
    bound = block.bounds()
    values = torch.linalg.svdvals(block.matrix().detach().double())
    assert bound.forward == pytest.approx(float(values[0]), rel=1e-6)
    assert bound.inverse == pytest.approx(1 / float(values[-1]), rel=1e-6)
    if kind == "orthogonal":
        assert bound.forward == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["full", "plu"])
def test_conv1x1_cache_is_used_in_eval_and_never_stale(kind):
    block = InvertibleConv1x1(4, kind=kind).eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        first = block.inverse_matrix()
        assert block.inverse_matrix() is first
        weight = block.weight if kind == "full" else block.log_diagonal
        weight.data.add_(0.3)  # moves no version counter
        assert torch.allclose(block.inverse(block(x)), x, atol=1e-5)
    z = block(x)
    assert block.inverse(z).requires_grad  # with gradients on, nothing is cached
    block.train()
    with torch.no_grad():
        assert block.inverse_matrix() is not block.inverse_matrix()


def test_conv1x1_inverse_is_solved_in_double_precision():
    """A badly conditioned matrix: the float64 solve loses what float32 data must lose, a float32 inverse loses more."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0] for _ in range(2))
    matrix = u @ torch.diag(torch.logspace(0, -5, 16, dtype=torch.float64)) @ v
    block = InvertibleConv1x1(16)
    block.weight.data.copy_(matrix)
    inverse = torch.linalg.inv(block.weight.double()).float()
    assert torch.allclose(block.inverse_matrix(), inverse, rtol=1e-6, atol=0)
    single = torch.linalg.inv(block.weight)
    assert (single - inverse).abs().max() > 100 * (block.inverse_matrix() - inverse).abs().max()


def test_permutations():
    with pytest.raises(PartitionError, match="is not a permutation"):
        Permutation([0, 0, 1])
    source, target = Permutation.shuffle(20), Permutation.shuffle(20)
    target.load_state_dict(source.state_dict())
    x = torch.randn(2, 20)
    assert torch.equal(target.inverse(source(x)), x)


def test_diagonal_bounds_are_exact():
    bound = DiagonalScaling(torch.tensor([0.25, -3.0, 1.0])).bounds()
    assert bound.forward == pytest.approx(3.0)
    assert bound.inverse == pytest.approx(4.0)
    with pytest.raises(InputError, match="non-zero"):
        DiagonalScaling(torch.tensor([1.0, 0.0]))


def test_non_finite_parameters_are_named():
    chain = Chain(ActNorm(2, start="identity"), InvertibleConv1x1(2))
    chain[0].bias.data[1] = torch.nan
    with pytest.raises(NonFiniteParameters, match=r"'blocks.0.bias' of Chain holds 1 NaN or Inf of 2 entries"):
        chain.bounds()


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e5])
def test_inverse_by_products_for_captured_steps(condition):
    from bilip.blocks.conv1x1 import _newton

    q = [torch.linalg.qr(torch.randn(3, 24, 24, dtype=torch.float64))[0] for _ in range(2)]
    singular = torch.logspace(0, -math.log10(condition), 24, dtype=torch.float64)
    weight = 30 * (q[0] * singular @ q[1]).float()
    true, found = torch.linalg.inv(weight.double()), _newton(weight)
    assert float((found - true).norm() / true.norm()) < 1e-6
    assert torch.allclose(_newton(weight[0]), found[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_by_products_minds_neither_autocast_nor_tf32(dtype, monkeypatch):
    from bilip.blocks import conv1x1

    weight = torch.linalg.qr(torch.randn(8, 4, 4, dtype=torch.float64))[0].to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(conv1x1._newton(weight), weight.mT, atol=1e-6)
    monkeypatch.setattr(conv1x1, "_tf32", lambda: True)
    seen = []
    monkeypatch.setattr(torch, "baddbmm", lambda x, *args, **options: seen.append(x.dtype) or torch.sub(x, 0))
    conv1x1._newton(weight)
    assert set(seen) == {torch.float64}


def test_actnorm_follows_the_state_that_is_lent_to_it():
    block, x = blocks.ActNorm(2).train(), torch.randn(8, 2) * 100
    lent = {name: value.clone() for name, value in blocks.ActNorm(2, start="identity").state_dict().items()}
    assert torch.equal(torch.func.functional_call(block, lent, (x,)), x)
    assert not lent["bias"].any()  # not started anew
    assert not block.initialized
    z = block(x)  # its own start is still to come
    assert torch.allclose(z.mean(0), torch.zeros(2), atol=1e-5)
    fresh = {name: value.clone() for name, value in blocks.ActNorm(2).state_dict().items()}
    with pytest.raises(NotInitialized):
        torch.func.functional_call(block.eval(), fresh, (x,))


def test_actnorm_is_ready_in_an_averaged_copy():
    model = torch.nn.Sequential(blocks.ActNorm(2)).train()
    average = torch.optim.swa_utils.AveragedModel(model)
    z = model(torch.randn(9, 2) * 4)
    average.update_parameters(model)
    assert torch.equal(average.eval()(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert z.shape == (9, 2)


@pytest.mark.parametrize("write", [lambda flag: flag.fill_(True), lambda flag: flag.data.fill_(True)])
def test_actnorm_believes_its_buffer(write):
    block, x = blocks.ActNorm(2).train(), torch.randn(8, 2) * 100
    write(block.initialized)
    assert torch.equal(block(x), x)
    block.initialized.fill_(False)
    assert not torch.equal(block(x), x)


def test_actnorms_of_an_ensemble():
    models = [blocks.ActNorm(2, start="identity") for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.randn(4, 2)
    z = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(parameters, buffers)
    assert torch.equal(z, x.expand(3, 4, 2))


def test_an_orthogonal_block_can_be_pickled_and_loads_states_of_torchs_parametrization():
    block = blocks.InvertibleConv1x1(4, kind="orthogonal")
    again = pickle.loads(pickle.dumps(block))
    assert torch.equal(again.weight, block.weight)
    linear = torch.nn.utils.parametrizations.orthogonal(
        torch.nn.Linear(4, 4, bias=False), "weight", "matrix_exp", use_trivialization=False
    )
    again.load_state_dict(linear.state_dict())
    assert torch.allclose(again.weight, linear.weight, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_orthogonal_block_in_half_precision(dtype):
    block, x = blocks.InvertibleConv1x1(4, kind="orthogonal").to(dtype).eval(), torch.randn(3, 4).to(dtype)
    assert torch.allclose(block.inverse(block(x)), x, atol=16 * torch.finfo(dtype).eps)


def test_a_permutation_of_many_channels_is_told_apart_in_bfloat16():
    """Among 16-bit numbers 256 and 257 are one: an inverse kept for one order would serve the other."""
    block = InvertibleConv1x1(260, kind="plu").bfloat16().eval()
    with torch.no_grad():
        for p in block.parameters():
            p.zero_()
        block.permutation.copy_(torch.arange(260))
        before = block.inverse_matrix()
        block.permutation[256:258] = torch.tensor([257, 256])
        assert not torch.equal(block.inverse_matrix(), before)


def test_orthogonal_matrices_keep_up_with_the_dtype():
    block = blocks.InvertibleConv1x1(8, kind="orthogonal").double()
    x = torch.randn(5, 8, dtype=torch.float64)
    assert float((block.inverse(block(x)) - x).abs().max()) < 1e-13


def test_caches_know_all_they_depend_on():
    held = HeldLinear(4, 4, coefficient=2.0).eval()
    plu = blocks.InvertibleConv1x1(3, kind="plu").eval()
    x = torch.randn(2, 3)
    with torch.no_grad():
        held.weight.mul_(100)
        held.held_weight()
        held.coefficient = 0.5
        assert matrix_norm(held.held_weight()) <= 0.5
        plu.inverse(x)
        plu.sign.neg_()
        assert torch.allclose(plu.inverse(plu(x)), x, atol=1e-5)


def test_singular_matrices_are_called_singular():
    block = blocks.InvertibleConv1x1(2)
    block.weight.data.fill_(1.0)
    for call in (lambda: block.bounds(), lambda: Chain(block, shape=(2,)).bounds(Box(-1, 1))):
        with pytest.raises(NoGlobalBound, match="singular to working precision"):
            call()
