"""Every library against the same promises."""

import copy

import pytest
import torch
from torch import nn

from adapters.zoo import CASES, IDS
from bilip.adapters import Foreign, adapt, has_log_det
from bilip.blocks import Chain
from bilip.errors import BilipError

pytestmark = pytest.mark.parametrize("case", CASES, ids=IDS)


@pytest.fixture
def made(case):
    """The model in float64 where it is a module, and what `adapt` sees."""
    if not case.installed:
        pytest.skip(f"{case.needs or case.library} is not installed")
    model = case.model()
    if isinstance(model, nn.Module):
        model = model.double().eval()
    return model, adapt(model)


def double(adapted):
    return copy.deepcopy(adapted.bijection).double().eval()


def jacobian(map_, x, context):
    rows = []
    for k in range(len(x)):
        given = None if context is None else context[k : k + 1]
        row = torch.autograd.functional.jacobian(lambda v, given=given: map_(v[None], given)[0].flatten(), x[k])
        rows.append(row.flatten(1))
    return torch.stack(rows)


def test_round_trip(case, made):
    bijection = double(made[1])
    x, context = case.batch(), case.contexts()
    with torch.no_grad():
        z = bijection(x, context)
        back = bijection.inverse(z.clone(), context)
        assert z.dtype == torch.float64
        assert (back - x).abs().max() < case.trip
        assert not torch.equal(back, z)
        assert torch.equal(z, bijection(x, context))


def test_log_det_is_that_of_the_jacobian(case, made):
    bijection = double(made[1])
    x, context = case.batch(3), case.contexts(3)
    assert has_log_det(bijection) == case.log_det
    if not case.log_det:
        with pytest.raises(BilipError, match="log-determinant"):
            bijection.forward_and_log_det(x)
        return
    with torch.no_grad():
        z, log_det = bijection.forward_and_log_det(x, context)
        back, log_back = bijection.inverse_and_log_det(z, context)
    assert log_det.shape == log_back.shape == (3,)
    assert log_det.dtype == torch.float64
    assert torch.allclose(z, bijection(x, context), atol=1e-10)
    assert torch.allclose(back, x, atol=1e2 * case.trip)
    if case.stochastic:
        draws = torch.stack([bijection.forward_and_log_det(x, context)[1].detach() for _ in range(100)])
        exact = torch.linalg.slogdet(jacobian(bijection, x, context))[1]
        assert ((draws.mean(0) - exact).abs() < 5 * draws.std(0) / 100**0.5 + 1e-3).all()
        assert draws.std(0).max() > 0
        return
    exact = torch.linalg.slogdet(jacobian(bijection, x, context))[1]
    assert torch.allclose(log_det, exact, atol=max(1e-9, case.trip))
    assert torch.allclose(log_det, -log_back, atol=max(1e-9, 1e2 * case.trip))


def test_jacobians_of_both_directions_are_inverse(case, made):
    """An inverse that is solved for must also be differentiated."""
    bijection = double(made[1])
    x, context = case.batch(2), case.contexts(2)
    with torch.no_grad():
        z = bijection(x, context)
    there, back = jacobian(bijection, x, context), jacobian(bijection.inverse, z, context)
    assert torch.allclose(back @ there, torch.eye(there.shape[-1], dtype=torch.float64), atol=max(1e-8, 10 * case.trip))


def test_log_prob_is_that_of_the_library(case, made):
    """Direction and base at once."""
    model, adapted = made
    assert adapted.library == case.library
    if case.log_prob is None:
        assert adapted.base is None or case.stochastic
        return
    x, context = case.batch(), case.contexts()
    bijection = adapted.bijection.double()
    with torch.no_grad():
        z, log_det = bijection.forward_and_log_det(x, context)
        ours = adapted.base.log_prob(z, context) + log_det
        theirs = case.log_prob(model, x, context)
    theirs = theirs.flatten(1).sum(1) if theirs.ndim > 1 else theirs
    assert ours.shape == (4,)
    assert torch.allclose(ours, theirs.double(), atol=1e-6, rtol=1e-6)


def test_base_samples(case, made):
    adapted = made[1]
    if adapted.base is None:
        return
    if not case.samples:
        with pytest.raises(NotImplementedError):
            adapted.base.sample(5)
        return
    context = case.contexts(5)
    bijection = adapted.bijection.double()
    z = adapted.base.sample(5, context, torch.Generator().manual_seed(0))
    again = adapted.base.sample(5, context, torch.Generator().manual_seed(0))
    other = adapted.base.sample(5, context)
    assert torch.equal(z, again)
    assert not torch.equal(z, other)
    assert z.dtype == torch.float64
    with torch.no_grad():
        x = bijection.inverse(z, context)
    assert x.shape == (5, *case.shape)
    if bijection.shape is not None:
        assert z.shape[1:] == bijection.out_shape(case.shape)
    bijection.float()
    assert adapted.base.sample(5, None if context is None else context.float()).dtype == torch.float32


def test_blocks_are_the_whole(case, made):
    bijection = double(made[1])
    blocks = list(bijection) if isinstance(bijection, Chain) else [bijection]
    assert all(isinstance(block, Foreign) for block in blocks)
    for block in blocks:
        assert f"[{block.kind}]" in repr(block)
    if case.blocks is not None:
        assert tuple(block.kind for block in blocks) == case.blocks
    x, context = case.batch(), case.contexts()
    with torch.no_grad():
        z = x
        for block in blocks:
            z = block(z, context)
        assert torch.equal(z, bijection(x, context))


def test_samples_do_not_mix(case, made):
    """One row at a time, with its slice of the context, gives the row of the batch."""
    bijection = double(made[1])
    x, context = case.batch(), case.contexts()
    with torch.no_grad():
        z = bijection(x, context)
        alone = bijection(x[2:3], None if context is None else context[2:3])
    assert torch.allclose(z[2:3], alone, atol=case.trip)


def test_parameters_state_and_gradients(case, made):
    model, adapted = made
    bijection = adapted.bijection
    x, context = case.batch().to(torch.float64), case.contexts()
    twin = copy.deepcopy(bijection).double()
    bijection.double()
    parameters = [p for p in twin.parameters() if p.is_floating_point() and p.requires_grad]
    with torch.no_grad():
        before = bijection(x, context)
        for p in parameters:
            p.add_(0.1)
        if parameters:
            assert not torch.allclose(twin(x, context), before), "a copy must not share what it computes with"
        assert torch.equal(bijection(x, context), before)
        for value in twin.buffers():
            if value.is_floating_point() and value.ndim:
                value.mul_(1.0)
        twin.load_state_dict(bijection.state_dict())
        assert torch.allclose(twin(x, context), before, atol=1e-12)
    if isinstance(model, nn.Module) and adapted.library != "sbi":
        mine = {id(p) for p in bijection.parameters()}
        assert mine <= {id(p) for p in model.parameters()}
    if parameters:
        loss = bijection.train()(x, context).square().sum()  # in evaluation mode zuko's CNF has no gradients
        grads = torch.autograd.grad(loss, [p for p in bijection.parameters() if p.requires_grad], allow_unused=True)
        assert any(g is not None and g.abs().max() > 0 for g in grads)


def test_bad_input_gets_a_sentence(case, made):
    bijection = made[1].bijection
    with pytest.raises(BilipError, match="expected"):
        bijection(torch.zeros(3, *case.shape).long())
