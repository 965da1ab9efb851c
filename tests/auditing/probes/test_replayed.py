"""Calls that are recorded and replayed, on CUDA graphs that are played on the CPU."""

import contextlib

import pytest
import torch

import bilip
from bilip import _torch
from bilip._torch import EvalCache, Replayed
from bilip.auditing import subject as subject_module
from bilip.auditing.float32 import float32_products
from bilip.auditing.probes import blame
from bilip.auditing.probes.attack import Attack
from bilip.auditing.subject import Subject
from bilip.blocks import conv1x1
from bilip.errors import NotMeasured
from bilip.linalg import linearized
from bilip.models import glow, residual_flow
from recorded import play_graphs_on_the_cpu

pytestmark = pytest.mark.numeric


@pytest.fixture
def graphs(monkeypatch):
    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(_torch, "can_record", lambda *tensors: True)
    made = []
    plain = Replayed.__init__

    def init(self, *args):
        plain(self, *args)
        made.append(self)

    monkeypatch.setattr(Replayed, "__init__", init)
    return made


def trained(model, size):
    torch.manual_seed(0)
    with torch.no_grad():
        model(torch.rand(16, *size))
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def test_calls_after_the_second_are_replays_with_their_own_tensors(graphs):
    calls = []

    def function(x, y):
        calls.append(x)
        return x * y, (x + y).sum(1)

    often = Replayed(function)
    for k in range(6):
        x, y = torch.full((2, 3), float(k)), torch.arange(6.0).view(2, 3) - k
        product, total = often(x, y)
        assert torch.equal(product, x * y)
        assert torch.equal(total, (x + y).sum(1))
    assert often.replays == 4
    assert len(calls) == 4  # twice as they are, once on a stream of its own, once recorded
    kept = often(torch.ones(2, 3), torch.ones(2, 3))[0]
    often(torch.zeros(2, 3), torch.ones(2, 3))
    assert torch.equal(kept, torch.ones(2, 3))  # a later replay writes elsewhere
    assert torch.equal(often(torch.ones(4, 3), torch.ones(4, 3))[1], torch.full((4,), 6.0))  # another shape: as it is


FIRST = torch.ones(2)
GENERATOR = torch.Generator().manual_seed(0)


def refuses(x):
    raise ValueError("not this way")


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (lambda x: x * 2 if float(x.sum()) > 0 else -x * -2, "not permitted"),
        (lambda x: 2 * x + 0 * torch.rand(x.shape, generator=GENERATOR), "generator"),
        (lambda x: 2 * FIRST, "other numbers"),  # does not see what it is given
        (lambda x: (2 * x)[:1], "other numbers"),
        (refuses, "not this way"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(graphs, recorded, why):
    often = Replayed(recorded, lambda x: 2 * x)
    found = [often(torch.full((2,), float(k))) for k in (1, -2, 3)]
    assert [value.tolist() for value in found] == [[2.0, 2.0], [-4.0, -4.0], [6.0, 6.0]]
    assert often.replays == 0
    assert why in often.failed


@pytest.mark.parametrize("hidden", [False, True])
def test_an_interruption_while_recording_goes_on(graphs, monkeypatch, hidden):
    played = torch.cuda.graph

    @contextlib.contextmanager
    def broken_off(graph):  # as on a GPU: what ends a recording in the middle is said in other words
        try:
            with played(graph):
                yield
        finally:
            raise RuntimeError("capture failed")

    def stopped(x):
        if recording:
            raise KeyboardInterrupt
        recording.append(x)  # on a stream of its own, before it is recorded
        return 2 * x

    recording = []
    if hidden:
        monkeypatch.setattr(torch.cuda, "graph", broken_off)
    often = Replayed(stopped, lambda x: 2 * x)
    often(torch.ones(2))
    with pytest.raises(KeyboardInterrupt):
        often(torch.ones(2))
    assert torch.equal(often(torch.ones(2)), torch.full((2,), 2.0))


def test_an_attack_with_replays_finds_what_one_without_finds(graphs, monkeypatch):
    size = (3, 8, 8)
    model, x = trained(glow(size, levels=2, blocks=1, hidden=8), size), torch.rand(64, *size)
    attack = Attack(steps=8, samples=3, methods=["gain", "roundtrip", "random", "singular"])
    newton = []
    monkeypatch.setattr(conv1x1, "_newton", lambda weight: newton.append(weight) or torch.linalg.inv(weight))
    found = attack.search(model, x)
    assert sum(often.replays for often in graphs) > 8 * 4
    assert not any(often.failed for often in graphs)
    assert not newton  # the inverses of the matrices are those that the model itself computed
    monkeypatch.setattr(_torch, "can_record", lambda *tensors: False)
    alone = attack.search(model, x)
    for method, run in alone.runs.items():
        for name in ("points", "l2", "errors", "trajectory", "random_steps"):
            torch.testing.assert_close(getattr(found.runs[method], name), getattr(run, name), rtol=0, atol=0)


def test_what_replays_found_is_judged_by_the_model(graphs, monkeypatch):
    size = (3, 8, 8)
    model, x = trained(glow(size, levels=1, blocks=1, hidden=8), size), torch.rand(64, *size)
    replay = Replayed._replay
    monkeypatch.setattr(
        Replayed,
        "_replay",
        lambda self, graph, inputs: replay(self, graph, inputs) * (torch.nan if self.replays else 1),
    )
    found = Attack(steps=8, samples=2, methods=["random"]).search(model, x)
    assert bool(torch.isinf(found.runs["random"].trajectory[-1]).all())  # replays that went wrong
    assert not bool(found.success.any())


def test_iterative_inverses_and_autocast_are_not_recorded(graphs):
    model = trained(residual_flow((2,), blocks=1, hidden=(8,)), (2,))
    Attack(steps=8, samples=2, methods=["random"]).search(model, torch.randn(32, 2))
    assert not graphs
    size = (3, 8, 8)
    model, x = trained(glow(size, levels=1, blocks=1, hidden=8), size), torch.rand(32, *size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Attack(steps=8, samples=2, methods=["random"]).search(model, x)
    assert graphs
    assert not any(often.replays for often in graphs)


def test_a_cache_gives_what_it_kept_only_to_recordings_that_ask_for_it(monkeypatch):
    cache, owner, weight = EvalCache(), torch.nn.Identity().eval(), torch.eye(2)
    first = cache.get(owner, weight, torch.exp)
    monkeypatch.setattr("bilip._torch.capturing", lambda x: True)
    with _torch.setting(_torch._KEEPING, True):
        assert cache.get(owner, weight, torch.exp) is first
        assert cache.get(owner, torch.eye(3), torch.exp).shape == (3, 3)
        assert cache.get(owner, weight, torch.exp) is not first  # emptied by the other shape
    assert cache._kept is None


def test_an_audit_with_replays_gives_the_record_of_one_without(graphs, monkeypatch):
    size = (3, 8, 8)
    model, x = trained(glow(size, levels=1, blocks=1, hidden=8), size), torch.rand(600, *size)
    monkeypatch.setattr(subject_module, "can_record", lambda *tensors: True)
    options = {"budget": "quick", "probes": "reconstruction,likelihood,consistency"}
    with_replays = bilip.audit(model, x, **options)
    assert sum(often.replays for often in graphs) > 4
    assert not any(often.failed for often in graphs)
    monkeypatch.setattr(subject_module, "can_record", lambda *tensors: False)
    count = len(graphs)
    assert bilip.audit(model, x, **options).measurements == with_replays.measurements
    assert len(graphs) == count


def numbers(record):
    """All that an audit measured, by where it stands: numbers, and the rest."""
    found = {}

    def add(path, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                add((*path, key), inner)
        elif isinstance(value, (list, tuple)):
            for key, inner in enumerate(value):
                add((*path, key), inner)
        elif isinstance(value, float):
            found[path] = value
        else:
            words[path] = value

    words = {}
    for m in record.measurements:
        add((m.probe, m.source), {"values": m.values, "rows": m.rows, "series": m.series, "notes": m.notes})
    return found, words


def test_a_model_linearised_by_replays_is_that_linearised_block_by_block(graphs, monkeypatch):
    """Products with Jacobians at every point, source and probe come from a few recordings, and so do the looks at all blocks."""
    size = (3, 16, 16)  # beyond what is built as matrices
    model, x = trained(glow(size, levels=2, blocks=1, hidden=4), size), torch.rand(40, *size)
    options = {"budget": "quick", "probes": "spectrum,bounds,log_det,attack,blame,precision", "ood": ["uniform"]}
    monkeypatch.setattr(subject_module, "can_record", lambda *tensors: True)
    monkeypatch.setattr(blame, "_fit_together", lambda stored: True)
    found, words = numbers(bilip.audit(model, x, **options))
    assert not any(often.failed for often in graphs)
    repeated = [often for often in graphs if often.replays > 5]
    assert len(repeated) >= 10  # linearising, four products of the model and of its blocks, checks
    monkeypatch.setattr(blame, "_fit_together", lambda stored: False)
    for module in (subject_module, _torch):
        monkeypatch.setattr(module, "can_record", lambda *tensors: False)
    alone, same = numbers(bilip.audit(model, x, **options))
    assert found == pytest.approx(alone, rel=1e-6, abs=1e-9, nan_ok=True)
    assert words == same


def test_points_that_replays_cannot_linearise_are_told_block_by_block(graphs, monkeypatch):
    size = (3, 16, 16)
    model, x = trained(glow(size, levels=1, blocks=1, hidden=4), size), torch.rand(3, *size)
    monkeypatch.setattr(subject_module, "can_record", lambda *tensors: True)
    subject = Subject.of(model)
    with subject.repeating():
        first, second = subject.linearized(x[:1]), subject.linearized(x[1:2])
        v = torch.randn(1, first.size, dtype=torch.float64)
        for at, point in ((first, x[:1]), (second, x[1:2]), (first, x[:1])):  # in turn
            assert isinstance(at, linearized.AtPoint)
            plain = linearized.Linearized(subject.copy_in(torch.float64).parts, point)
            for name in ("apply", "adjoint", "solve", "solve_adjoint"):
                torch.testing.assert_close(getattr(at, name)(v), getattr(plain, name)(v), rtol=1e-9, atol=1e-9)
        assert 0 < first.residual < 1e-10
        with pytest.raises(NotMeasured, match="is not finite after block 0"):
            subject.linearized(torch.full((1, *size), torch.inf))
        with monkeypatch.context() as context:
            context.setattr(linearized, "_WORST_RESIDUAL", 0.0)
            assert subject.repointed(x[:1]) is None  # checks that fail
        assert subject.repointed(x[:1], torch.zeros(1, 2)) is None  # with a context
    assert isinstance(subject.linearized(x[:1]), linearized.Linearized)  # weights may change from here on
    other = Subject.of(trained(glow(size, levels=1, blocks=1, hidden=4, mixing="shuffle", coupling="additive"), size))
    monkeypatch.setattr(other.bijection[-1].t.layers[-1], "padding_mode", "circular")
    with other.repeating():  # a net whose transpose is not written down
        assert other.repointed(x[:1]) is None


def test_nothing_is_replayed_once_an_audit_is_over(graphs, monkeypatch):
    """Weights may change from then on, and what was recorded holds the inverses of the old ones."""
    size = (3, 8, 8)
    model, x = trained(glow(size, levels=1, blocks=1, hidden=8), size), torch.rand(64, *size)
    monkeypatch.setattr(subject_module, "can_record", lambda *tensors: True)
    subject = Subject.of(model)
    with subject.repeating():
        for _ in range(4):
            z = subject.forward(x).value
            subject.inverse(z)
            subject.copy_in(torch.float64).forward(x.double())
        assert len(graphs) == 3
        assert all(often.replays == 2 for often in graphs)
        kinds = len(graphs)
        with float32_products("tf32"):
            subject.forward(x)
        assert len(graphs) == kinds + 1  # other switches, another recording
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    back = subject.inverse(subject.forward(x).value).value
    assert float((back - x).abs().max()) < 1e-4
    assert len(graphs) == kinds + 1
    assert subject._session.recorded is None
