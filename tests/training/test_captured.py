"""Captured steps: the numbers of eager ones, whatever happens on the way. On a CPU the graphs are played (`recorded.py`)."""

import warnings
from dataclasses import replace

import pytest
import torch

from bilip import Chain, Flow, Guard, Reversible, models
from bilip.blocks import Poisson, Residual, Roulette, Series
from bilip.data import checkerboard, seed_of
from bilip.errors import InputError
from bilip.nets import MLP, matrix_norm
from bilip.nets.spectral import held_layers
from bilip.objectives import Likelihood
from bilip.recipes import checkerboard as checkerboard_recipe
from bilip.recipes import configured, regression_2d
from bilip.recipes.recipe import Work
from bilip.regularizers import ActivationNorm, FiniteDifference, FlowLikelihood
from bilip.reversible import DriftWarning, call
from bilip.training import Settings, Task, read_log, read_state, train
from bilip.training.step import WARMUP
from catalogue import squash
from recorded import watched_captures
from training.runs import silent

STEPS, SEED, BATCH = 40, 1, 48


@pytest.fixture
def captured(device, monkeypatch):
    """The captured steps of the runs of a test, in their order."""
    return watched_captures(monkeypatch, device)


def make_task(trunk, penalties=(), at=None):
    """The likelihood of a checkerboard; `at` are things that happen before some steps."""
    happens = {seed_of(SEED, step, "data"): action for step, action in (at or {}).items()}

    def batch(draw):
        x = checkerboard(BATCH, draw("data"))
        action = happens.get(draw("data"))
        return (x if action is None else action(x),)

    return Task(Flow(trunk), batch, Likelihood(penalties), penalties=penalties)


def make_trunk(**options):
    torch.manual_seed(0)
    return models.real_nvp(2, blocks=4, hidden=(16, 16), **options)


def make_settings(device, **changes):
    return Settings(**{"steps": STEPS, "lr": 5e-3, "seed": SEED, "log_every": 1, "device": device.type} | changes)


def squashed(trunk, x):
    """From now on the inverse of a block is lost."""
    squash(trunk[2], 1e-9)
    return x


def drifting(step, budget=2**20):
    """A task whose walk begins to drift before a step."""
    trunk = make_trunk()
    base = make_task(Reversible(trunk, Guard(budget=budget)), at={step: lambda x: squashed(trunk, x)})

    def loss(model, step, x):
        return base.loss(model, step, x + 0.01 * torch.randn_like(x))  # drawn again in a step that is run again

    return Task(base.model, base.batch, loss)


def both(make, device, folder, **changes):
    """The same task trained eagerly and captured: the two tasks, and the largest difference of their weights."""
    tasks = []
    for name, capture in (("eager", False), ("captured", None)):
        tasks.append(make())
        train(tasks[-1], make_settings(device, capture=capture, **changes), folder / name, progress=silent)
    states = [read_state(folder / name / "last.safetensors")[0] for name in ("eager", "captured")]
    assert states[0].keys() == states[1].keys()
    apart = max(float((states[0][key].double() - states[1][key].double()).abs().max()) for key in states[0])
    return *tasks, apart


@pytest.mark.parametrize(
    "changes",
    [{}, {"clip": 0.5, "ema": 0.9}, {"warmup": 10, "milestones": (20, 30)}, {"accumulate": 3}, {"weight_decay": 0.1}],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_as_eager(captured, device, tmp_path, changes):
    *_, apart = both(lambda: make_task(make_trunk(actnorm=True)), device, tmp_path, **changes)
    assert apart < 1e-5  # the learning rate is a float32 tensor in a graph
    assert captured[0].replays == STEPS - WARMUP
    eager, replayed = (read_log(tmp_path / name, "train") for name in ("eager", "captured"))
    assert replayed["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert len(set(replayed["loss"])) == STEPS


def test_images(captured, device, tmp_path):
    def make():
        torch.manual_seed(0)
        trunk = Reversible(models.glow((3, 8, 8), levels=2, blocks=2, hidden=8))
        return Task(
            Flow(trunk),
            lambda draw: (torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(draw("data"))),),
            Likelihood((FlowLikelihood(0.01),)),
        )

    *_, apart = both(make, device, tmp_path, steps=8, lr=1e-3)
    assert apart < 2e-5
    assert captured[0].replays == 8 - WARMUP
    assert not captured[0].reruns


@pytest.mark.parametrize("budget", [0, 2**20])
def test_a_walk_that_begins_to_drift_is_repaired(captured, device, tmp_path, budget):
    eager, replayed, apart = both(lambda: drifting(12, budget), device, tmp_path, lr=1e-4)
    assert apart < 1e-5
    assert captured[0].reruns == (1 if budget else 2)  # without anchors the walk rests, and is tried again
    assert captured[0].replays > STEPS // 2
    reports = [task.model.bijection.report() for task in (eager, replayed)]
    assert reports[1].repaired == reports[0].repaired >= 1
    assert reports[1].steps == reports[0].steps == STEPS
    assert reports[1].anchors == reports[0].anchors
    assert bool(reports[1].anchors) == (budget > 0)


def test_where_ever_more_cancels_within_a_call_a_few_steps_are_run_again(captured, device, tmp_path):
    """What is left of the gradients tells a graph how much cancels; where that is too much, the step is run again."""

    def make():
        trunk = Reversible(make_trunk(), Guard(spot_check=0))

        def batch(draw):
            generator = torch.Generator().manual_seed(draw("data"))
            x = torch.randn(16, 2, generator=generator)
            return (torch.cat([x, x + 0.1 * 0.9**draw.step * torch.randn(16, 2, generator=generator)]),)

        def loss(model, step, x):
            z = model(x)
            return {"loss": (z[:16] - z[16:]).square().mean()}

        return Task(trunk, batch, loss)

    *_, apart = both(make, device, tmp_path, lr=1e-4)
    assert apart < 1e-4  # of 4e-3 that 40 steps of Adam may go: gradients of 1e-4 are known to a few digits
    assert 1 <= captured[0].reruns <= 8
    assert captured[0].replays > STEPS // 2


def test_differences_that_cancel_are_recorded_without_a_walk_and_the_steps_between_are_not(
    captured, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(call, "CANCELS", 1e-9)  # every difference does

    def make():
        penalties = (FiniteDifference(weight=1e-3, every=2),)
        return make_task(Reversible(make_trunk()), penalties)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        eager, replayed, apart = both(make, device, tmp_path, lr=1e-4)
    assert apart < 1e-3  # directions of a captured difference are drawn otherwise
    assert len(captured[0].graphs) == 2  # a step with the penalty, and one without
    assert not captured[0].reruns
    for task in (eager, replayed):
        report, watch = task.model.bijection.report(), task.model.bijection._watch
        assert 0 < report.repaired < report.steps - STEPS // 2 + 1
        assert watch.apart
        assert not watch.rest


def test_a_bare_walk_would_be_wrong(captured, device, tmp_path):
    """That the test above can fail."""
    results = []
    for guard in (Guard(), None):
        trunk = make_trunk()
        task = make_task(Reversible(trunk, guard), at={12: lambda x, trunk=trunk: squashed(trunk, x)})
        train(task, make_settings(device, lr=1e-4), tmp_path / str(len(results)), progress=silent)
        results.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    assert not torch.allclose(*results, atol=1e-4)


def test_spot_checks(captured, device, tmp_path):
    eager, replayed, apart = both(lambda: make_task(Reversible(make_trunk(), Guard(spot_check=7))), device, tmp_path)
    assert apart < 1e-5
    assert replayed.model.bijection.report().spot_checks == eager.model.bijection.report().spot_checks == STEPS // 7
    assert captured[0].replays >= STEPS - WARMUP - STEPS // 7


def test_random_directions_are_drawn_anew(captured, device, tmp_path):
    def make():
        penalty = FiniteDifference(0.3, every=2)
        return make_task(Reversible(make_trunk()), (penalty,), at=dict.fromkeys(range(STEPS), same))

    def same(x):
        return checkerboard(BATCH, 5)

    eager, replayed, _ = both(make, device, tmp_path, lr=1e-9)
    assert len(captured[0].graphs) == 2  # with the penalty, and without
    assert captured[0].replays == STEPS - 2 * WARMUP
    values = read_log(tmp_path / "captured", "train")["FiniteDifference"]
    assert len(set(values[::2])) == STEPS // 2  # only the directions change
    assert not any(values[1::2])
    expected = torch.tensor(read_log(tmp_path / "eager", "train")["FiniteDifference"][::2])
    assert float(torch.tensor(values[::2]).mean()) == pytest.approx(float(expected.mean()), rel=0.1)
    assert replayed.penalties[0].seen == eager.penalties[0].seen == STEPS // 2 * BATCH


@pytest.mark.parametrize(("eps", "reruns"), [(0.1, False), (1e-4, True)])
def test_a_penalty_that_asks_more_than_a_walk_can_give(captured, device, tmp_path, eps, reruns):
    """How small its steps are beside the samples is known on the device alone: the step is run again without its graph."""
    penalty = FiniteDifference(0.01, eps=eps, mode="forward")
    task = make_task(Reversible(make_trunk()), penalties=(penalty,))
    train(task, make_settings(device, steps=WARMUP + 6, lr=1e-4), tmp_path, progress=silent)
    assert captured[0].replays > 0
    assert captured[0].reruns == (captured[0].replays if reruns else 0)


def test_samples_that_are_not_finite_are_left_out(captured, device, tmp_path):
    def far(x):
        return torch.cat((x[:-1], torch.full((1, 2), 3e38)))

    def make():
        penalty = FiniteDifference(0.1)
        base = make_task(make_trunk(), at={20: far})

        def loss(model, step, x):
            return {"loss": base.loss(model, step, x[:-1])["loss"] + penalty(model, x, step=step)}

        return Task(base.model, base.batch, loss, penalties=(penalty,))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, replayed, _ = both(make, device, tmp_path, steps=21, clip=1.0)
    assert captured[0].reruns == 1
    assert replayed.penalties[0].skipped == eager.penalties[0].skipped == 1
    assert replayed.penalties[0].seen == eager.penalties[0].seen


def test_walks_of_a_penalty_are_watched(captured, device, tmp_path):
    """Activation norms run passes of their own, with guards of their own."""

    def make():
        trunk = make_trunk()
        base = make_task(trunk, at={12: lambda x: squashed(trunk, x)})
        penalty, walk = ActivationNorm(0.1), Reversible(trunk)

        def loss(model, step, x):
            return {"loss": base.loss(model, step, x)["loss"] + penalty(walk, x, step=step)}

        return Task(base.model, base.batch, loss, penalties=(penalty,))

    eager, replayed, apart = both(make, device, tmp_path, lr=1e-4)
    assert apart < 1e-5
    counts = [[walk.report().repaired for walk in task.penalties[0].walks()] for task in (eager, replayed)]
    assert counts[0] == counts[1] == [1]
    assert captured[0].reruns == 1


def test_walks_that_the_model_does_not_know_are_watched(captured, device, tmp_path):
    walks = []

    def make():
        trunk = make_trunk()
        base = make_task(trunk, at={12: lambda x: squashed(trunk, x)})
        walk = Reversible(trunk)
        walks.append(walk)

        def loss(model, step, x):
            z, log_det = walk.forward_and_log_det(x)
            return {"loss": (z.square().sum(1) / 2 - log_det).mean()}

        return Task(base.model, base.batch, loss)

    *_, apart = both(make, device, tmp_path, lr=1e-4)
    assert apart < 1e-5
    assert captured[0].reruns == 1
    assert walks[0].report().repaired == walks[1].report().repaired == 1


@pytest.mark.parametrize(
    "options", [{}, {"guard": Guard(budget=0)}, {"memory": "checkpoint"}, {"memory": "checkpoint", "guard": None}]
)
def test_outputs_that_overflow(captured, device, tmp_path, options):
    """Finite log-determinants, outputs that are not: a graph cannot turn to stored gradients, a step that is run again can."""

    def make():
        torch.manual_seed(0)
        trunk = models.real_nvp(2, blocks=6, hidden=(16,), scale="exp")

        def moved(k, by):
            def move(x):
                with torch.no_grad():
                    trunk[k].t.layers[-1].bias[1:] += by
                return x

            return move

        base = make_task(Reversible(trunk, **options), at={6: moved(2, -25.0), 15: moved(5, 100.0)})

        def loss(model, step, x):
            return {"loss": 1e-3 * model.bijection.forward_and_log_det(x)[1].square().mean()}

        return Task(base.model, base.batch, loss)

    *_, apart = both(make, device, tmp_path, steps=18)
    assert apart < 1e-4
    assert captured[0].reruns >= 1


def ends(make, device, folder, **changes):
    """The state in which a run ends, and its mean losses."""
    task = make()
    train(task, make_settings(device, lr=1e-4, **changes), folder, progress=silent)
    tensors, facts = read_state(folder / "last.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("sums.")}
    return tensors, facts["guards"], read_log(folder, "train")["loss"]


@pytest.mark.parametrize("budget", [0, 2**20])
@pytest.mark.parametrize("step", [7, 8, STEPS - 1])
def test_flags_that_are_read_while_the_next_step_runs(captured, device, tmp_path, budget, step):
    """Steps that wait for their flags, and steps that do not: the same weights, moments, counts and losses, bit for bit."""
    waited = ends(lambda: drifting(step, budget), device, tmp_path / "waited", log_every=1)
    ran_on = ends(lambda: drifting(step, budget), device, tmp_path / "ran on", log_every=STEPS)
    assert captured[0].reruns == captured[1].reruns >= 1
    assert captured[0].replays == captured[1].replays
    assert ran_on[0].keys() == waited[0].keys()
    assert ran_on[1] == waited[1]
    if device.type == "cpu":
        assert all(torch.equal(ran_on[0][name], value) for name, value in waited[0].items())
    assert ran_on[2] == pytest.approx([sum(waited[2]) / STEPS], rel=1e-5)


@pytest.mark.parametrize("log_every", [1, STEPS])
def test_running_statistics_see_every_batch_once(captured, device, tmp_path, log_every):
    """Also those of steps that are run again, because of a drift of their own or of the step before."""

    class Normed(torch.nn.Module):
        def __init__(self, trunk):
            super().__init__()
            self.trunk, self.norm = Reversible(trunk), torch.nn.BatchNorm1d(2)

    trunk = make_trunk()
    base = make_task(trunk, at={STEPS - 3: lambda x: squashed(trunk, x)})
    seen = []

    def batch(draw):
        seen.append(base.batch(draw)[0])
        return (seen[-1],)

    def loss(model, step, x):
        z, log_det = model.trunk.forward_and_log_det(x)
        return {"loss": (z.square().sum(1) / 2 - log_det).mean() + 0 * model.norm(x).sum()}

    model = Normed(trunk)
    train(Task(model, batch, loss), make_settings(device, lr=1e-4, log_every=log_every), tmp_path, progress=silent)
    assert captured[0].reruns == 1
    assert int(model.norm.num_batches_tracked) == STEPS
    expected = torch.zeros(2)
    for x in seen[-STEPS:]:
        expected = 0.9 * expected + 0.1 * x.mean(0).cpu()
    # A batch that counts twice moves it by 0.1 of some tenths; the one that is recorded on a CPU long before by a hundredth of that.
    assert float((model.norm.running_mean.cpu() - expected).norm()) < 5e-3


def test_the_host_runs_ahead(captured, device, tmp_path, monkeypatch):
    """That the test above compares two things: without a reason to look, a step is begun before the flags of the last one are read."""
    begun, looked = [], []
    from bilip.training import step as steps

    class Watched(steps.Pending):
        def __init__(self, step, *args):
            begun.append(step)
            super().__init__(step, *args)

        def raised(self):
            looked.append((self.step, begun[-1]))
            return super().raised()

    monkeypatch.setattr(steps, "Pending", Watched)
    train(drifting(STEPS), make_settings(device, log_every=STEPS), tmp_path, progress=silent)
    assert [(step, step + 1) for step in begun[:-1]] == looked[:-1]
    assert looked[-1] == (STEPS - 1, STEPS - 1)
    assert begun == list(range(WARMUP, STEPS))


def test_stopped_while_a_step_is_under_way(captured, device, tmp_path):
    def stop(done, steps, latest):
        if done == 9:
            raise KeyboardInterrupt

    whole = ends(lambda: drifting(8), device, tmp_path / "whole", log_every=STEPS)
    with pytest.raises(KeyboardInterrupt):
        train(drifting(8), make_settings(device, lr=1e-4, log_every=STEPS), tmp_path / "parts", progress=stop)
    assert read_state(tmp_path / "parts" / "last.safetensors")[1]["step"] == 9
    assert captured[1].reruns == 1  # it was repaired before it was saved
    parts = ends(lambda: drifting(STEPS), device, tmp_path / "parts", log_every=STEPS)
    assert parts[1]["bijection"]["steps"] == whole[1]["bijection"]["steps"] == STEPS
    assert parts[2] == pytest.approx(whole[2], rel=1e-4)


@pytest.mark.parametrize("changes", [{"ema": 0.9}, {"optimizer": "adamax"}, {"skip": 3}])
def test_updates_that_cannot_be_held_back_wait(captured, device, tmp_path, changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU Adamax stays eager
        train(drifting(7), make_settings(device, steps=10, **changes), tmp_path, progress=silent)
    assert captured[0].held is None
    assert captured[0].pending is None


def test_resumed(captured, device, tmp_path):
    def make():
        return make_task(Reversible(make_trunk(actnorm=True)), (FiniteDifference(0.1, every=3),))

    train(make(), make_settings(device), tmp_path / "whole", progress=silent)
    whole = read_log(tmp_path / "whole", "train")
    for stop in (2, 17):
        folder, task = tmp_path / f"stopped after {stop}", make()
        train(make(), make_settings(device, steps=stop), folder, progress=silent)
        train(task, make_settings(device), folder, progress=silent)
        parts = read_log(folder, "train")
        assert parts["step"] == whole["step"]
        # In the steps before a graph directions come from another generator: the same in distribution alone.
        assert parts["nll"] == pytest.approx(whole["nll"], rel=0.02)
        assert task.penalties[0].seen == -(-STEPS // 3) * BATCH


def residual_trunk(estimator, recompute=False):
    torch.manual_seed(0)
    blocks = [Residual(MLP(2, 2, hidden=(12,), activation="elu", lipschitz=0.9), log_det=estimator) for _ in range(3)]
    for block in blocks:
        block.recompute = recompute
        with torch.no_grad():
            for layer in held_layers(block):
                layer.weight *= 5  # so that all are held
    return Chain(*blocks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lr", [1e-4, 0.1])  # certificates last for many steps, or for none
def test_residual_flows_with_one_number_of_terms_for_all_blocks(captured, device, tmp_path, recompute, lr):
    estimator = Roulette(Poisson(2.0), exact_terms=1, shared=True)
    *tasks, apart = both(lambda: make_task(residual_trunk(estimator, recompute)), device, tmp_path, lr=lr)
    assert apart < (1e-5 if lr < 1e-3 else 2e-3)
    drawn = [dict(key[-1:])[estimator] for key in captured[0].graphs]
    assert len(set(drawn)) == len(drawn) >= 3  # a graph for each number
    assert all(estimator.law.probability(further) >= 0.01 for further in drawn)
    assert captured[0].replays > STEPS // 2
    assert not captured[0].failed
    for task in tasks:
        for layer in held_layers(task.model):
            assert matrix_norm(layer.held_weight()) <= layer.coefficient


def test_numbers_of_terms_that_are_rare_run_eagerly(captured, device, tmp_path, monkeypatch):
    monkeypatch.setattr("bilip.training.step.RARE", 0.2)
    estimator = Roulette(Poisson(2.0), exact_terms=1, shared=True)
    *_, apart = both(lambda: make_task(residual_trunk(estimator)), device, tmp_path)
    assert apart < 1e-3
    assert {dict(key[-1:])[estimator] for key in captured[0].graphs} == {1, 2}
    assert 0 < captured[0].replays < STEPS


def test_weights_of_a_captured_step_are_certified_outside_of_its_graphs(captured, device, tmp_path):
    """Weights that jump, a certificate that somebody else renews or takes away: the graphs go on, and layers stay held."""
    torch.manual_seed(0)
    trunk = residual_trunk(Series(3))
    held = held_layers(trunk)

    def jump(x):
        with torch.no_grad():
            for layer in held:
                layer.weight.data.mul_(7)
        return x

    def renew(x):
        trunk.bounds()
        return x

    def forget(x):
        for layer in held:
            layer._certificate = None
        return x

    task = make_task(trunk, at={10: jump, 15: renew, 20: forget})
    train(task, make_settings(device, steps=25), tmp_path, progress=silent)
    assert captured[0].replays == 25 - WARMUP
    assert len(captured[0].graphs) == 1
    assert all(matrix_norm(layer.held_weight()) <= layer.coefficient for layer in held)


def test_roulette_that_each_block_plays_alone_is_not_captured(captured, device, tmp_path):
    task = make_task(residual_trunk(Roulette(Poisson(2.0), exact_terms=1)))
    train(task, make_settings(device, steps=6), tmp_path, progress=silent)
    assert not captured
    with pytest.raises(InputError, match="shared=True"):
        train(task, make_settings(device, steps=6, capture=True), tmp_path / "must", progress=silent)


def test_what_cannot_be_captured_stays_eager(captured, device, tmp_path):
    def make():
        base = make_task(make_trunk())

        def loss(model, step, x):
            found = base.loss(model, step, x)
            assert float(found["loss"].detach()) < 1e6  # looks at a number
            return found

        return Task(base.model, base.batch, loss)

    with pytest.warns(UserWarning, match="cannot run as a CUDA graph and stays eager"):
        *_, apart = both(make, device, tmp_path)
    assert apart < 1e-5
    assert not captured[0].replays
    with pytest.raises(InputError, match="capture=True: this step cannot run as a CUDA graph"):
        train(make(), make_settings(device, capture=True), tmp_path / "must", progress=silent)


TINY = "couplings=4 blocks=2 hidden=8,8 residual_hidden=8,8 steps=8 residual_steps=8 evaluate_every=8 test=50 spacing=1"
CHECKERBOARD = configured(checkerboard_recipe.Config(), TINY.split())
REGRESSION = replace(regression_2d.Config(), widths=(10,), blocks=4, points=64, batch=64, steps=8, evaluate_every=8)


@pytest.mark.parametrize(
    ("recipe", "config", "part"),
    [(checkerboard_recipe.RECIPE, CHECKERBOARD, part) for part in ("sigmoid", "half", "residual")]
    + [(regression_2d.RECIPE, REGRESSION, part) for part in ("plain-10", "nf1e-06-10", "fd-10")],
)
def test_the_steps_of_the_recipes_can_be_captured(captured, device, tmp_path, monkeypatch, recipe, config, part):
    monkeypatch.setattr(checkerboard_recipe, "audited", lambda *args: {})  # not what is asked here
    recipe.run(part, config, Work(tmp_path, device=device.type))
    assert not captured[0].failed
    assert captured[0].replays >= 8 - WARMUP - 1  # every tenth step has another penalty
