"""The audit as a whole: what it leaves alone, what it repeats, and how much memory and how many samples it takes."""

import copy
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import bilip
from bilip import Chain, Flow, blocks, data
from bilip.auditing.audit import BUDGETS, staying
from bilip.auditing.probes import Probe
from bilip.auditing.verdicts import Thresholds
from bilip.errors import InputError, said_by
from bilip.record import Measurement

EPS = 2.0**-23
TINY = replace(BUDGETS["quick"], samples=64, batch=32, noise=64, draws=64, bad_share=0.2)
TINY = replace(TINY, walk=8, attack=1, attack_steps=3, precision=8)


def affine_flow(features=4):
    return Flow(bilip.models.real_nvp(features, blocks=3, hidden=(8,), scale="half_sigmoid"))


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4)], ids=["features", "images"])
def test_model_and_data_may_be_on_any_device(shape, device):
    flow = affine_flow() if len(shape) == 1 else Flow(bilip.models.glow(shape, levels=1, blocks=2, hidden=8))
    x = torch.randn(64, *shape)
    with torch.no_grad():
        flow.bijection(x)  # starts ActNorm
    record = bilip.audit(flow.to(device), {"test": x.to(device)}, ood=list(data.NOISE_NAMES), budget=TINY)
    assert {m.source for m in record.find("reconstruction") if m.measured} >= {"test", *data.NOISE_NAMES}


# ---- what an audit leaves alone


class Noisy(blocks.Permutation):
    """Draws from torch's global numbers on every call."""

    def forward(self, x, context=None):
        return super().forward(x, context) + 1e-3 * torch.randn_like(x)


def test_an_audit_leaves_the_model_and_torch_as_they_were():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    net[0].weight.requires_grad_(False)
    net[1].eval()
    model = Flow(Chain(blocks.AdditiveCoupling(net), Noisy.reverse(4), blocks.ActNorm(4), shape=(4,))).train()
    model.bijection(torch.randn(8, 4))
    net[1].eval()
    (model.bijection(torch.randn(8, 4)).sum()).backward()

    def state():
        return {
            "modes": {name: module.training for name, module in model.named_modules()},
            "needs": {name: p.requires_grad for name, p in model.named_parameters()},
            "grads": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
            "state": {name: value.tolist() for name, value in model.state_dict().items()},
            "rng": torch.get_rng_state().tolist(),
            "numpy": repr(np.random.get_state()),  # noqa: NPY002
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
        }

    before = state()
    seen = []

    class Watch(Probe):
        name = "watch"

        def _measure(self, subject, source):
            seen.append([m.training for m in subject.bijection.modules()])
            return Measurement(self.name, source.name)

    bilip.audit(model, torch.randn(64, 4).numpy(), ood=["uniform"], budget=TINY)
    torch.set_rng_state(torch.tensor(before["rng"], dtype=torch.uint8))
    bilip.audit(model, torch.zeros(8, 4), budget=TINY, probes=[Watch()])
    assert not any(map(any, seen))
    torch.set_rng_state(torch.tensor(before["rng"], dtype=torch.uint8))
    bilip.audit(model, np.ones((8, 4)), ood=["scaled:2"], budget=TINY)
    assert state() == before


SWITCHES = """
import sys, torch, bilip
from bilip.auditing.probes import Probe
from bilip.record import Measurement
B = torch.backends
def read(f):
    try:
        return str(f())
    except (RuntimeError, AttributeError) as error:
        return type(error).__name__
def switches():
    found = {"precision": read(torch.get_float32_matmul_precision), "cudnn": read(lambda: B.cudnn.allow_tf32)}
    found["matmul"] = read(lambda: B.cuda.matmul.allow_tf32)
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"):
        found[name] = read(lambda: eval("B." + name + ".fp32_precision", {"B": B}))
    return found
inside = {}
class Look(Probe):
    name = "look"
    def _measure(self, subject, source):
        inside.update(switches())
        return Measurement(self.name, source.name)
for change in sys.argv[1:]:
    exec(change)
    before = switches()
    bilip.audit(bilip.models.real_nvp(2, blocks=1), torch.randn(4, 2), probes=[Look(), "precision"], budget="quick")
    assert switches() == before, (change, before, switches())
    assert inside == before, (change, before, inside)
"""


@pytest.mark.process
@pytest.mark.slow
def test_the_model_runs_under_the_users_own_switches():
    old = [
        "pass",
        "B.cuda.matmul.allow_tf32 = True",
        "B.cudnn.allow_tf32 = False",
        "torch.set_float32_matmul_precision('medium')",
        "torch.set_float32_matmul_precision('high')",
    ]
    new = ["B.cuda.matmul.fp32_precision = 'tf32'", "B.cudnn.conv.fp32_precision = 'ieee'", "B.fp32_precision = 'tf32'"]
    changes = old + (new if hasattr(torch.backends.cuda.matmul, "fp32_precision") else [])
    done = subprocess.run([sys.executable, "-c", SWITCHES, *changes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_an_audit_inside_a_gradient_mode(mode):
    with mode():
        record = bilip.audit(affine_flow(), torch.randn(32, 4), budget=TINY)
    assert record.verdicts["likelihood"].status == "safe"
    assert record.find("spectrum")[0].measured
    assert record.find("attack")[0].measured


# ---- repeatable


def content(record):
    document = json.loads(record.to_json())
    del document["created"], document["settings"]["seconds"], document["environment"]
    return document


def test_the_same_seed_gives_the_same_record():
    torch.manual_seed(3)
    model, x = affine_flow(2), torch.randn(64, 2)
    records = []
    for k in range(2):
        torch.manual_seed(k)  # the caller's own state must not matter
        records.append(bilip.audit(model, x, ood=["uniform", "gaussian"], budget=TINY, seed=5))
    assert content(records[0]) == content(records[1])
    found = [bilip.audit(model, x, budget=TINY, probes=["sampling"], seed=seed).measurements[0] for seed in (5, 6)]
    assert found[0]["sample_bits_median"] != found[1]["sample_bits_median"]


def test_models_that_draw_numbers_are_repeatable_too():
    model, x = Flow(Chain(Noisy.reverse(4), shape=(4,))), torch.randn(16, 4)
    records = []
    for k in range(2):
        torch.manual_seed(k)
        records.append(bilip.audit(model, x, budget=TINY, probes=["reconstruction", "consistency", "sampling"]))
    assert content(records[0]) == content(records[1])
    assert "another answer" in records[0].verdicts["likelihood"].reason


@pytest.mark.parametrize("scale", ["half_sigmoid", "exp"])
def test_batch_sizes_do_not_change_verdicts(scale):
    torch.manual_seed(1)
    flow = Flow(bilip.models.real_nvp(4, blocks=24 if scale == "exp" else 3, hidden=(32,), scale=scale))
    if scale == "exp":
        for p in flow.parameters():
            p.data *= 1.6
    x, found = torch.randn(60, 4), []
    for batch in (7, 32, 60):
        record = bilip.audit(
            flow,
            x,
            ood=["uniform"],
            budget=replace(TINY, batch=batch),
            probes=["consistency", "reconstruction", "likelihood", "log_det", "sampling", "trust"],
        )
        found.append({use: (v.status, v.number, v.source) for use, v in record.verdicts.items()})
        count = 60 if scale == "half_sigmoid" else 16  # decided early
        assert record.find("reconstruction", "data")[0]["count"] == count
    assert found[0] == found[1] == found[2]
    assert found[0]["inversion"][0] == ("safe" if scale == "half_sigmoid" else "unsafe")


# ---- memory

MEMORY = """
import sys, re, bilip
from bilip.auditing.audit import BUDGETS, staying
from dataclasses import replace
import torch
torch.manual_seed(0)
peak = 0
def look(text, share):
    global peak
    with open("/proc/self/status") as file:
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+) kB", file.read())[1]))
flow = bilip.Flow(bilip.Chain(bilip.blocks.Permutation.reverse(256), shape=(256,)))
budget = replace(BUDGETS["quick"], samples=None, batch=1024)
record = bilip.audit(flow, sys.argv[1], budget=budget, probes=["reconstruction", "log_det", "trust"], progress=look)
print(record.find("trust")[0]["count"], peak)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.soak
def test_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    """12 times the samples: the file grows by 56 MB, and the process by less than 4 MB of what it holds."""
    peaks = []
    # Blocks that are free go back at once: else what is counted is how the allocator happened to fill its arenas.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for count in (5_000, 60_000):
        path = tmp_path / f"{count}.npy"
        rng = np.random.default_rng(0)
        array = np.lib.format.open_memmap(path, "w+", np.float32, (count, 256))
        for start in range(0, count, 5_000):
            array[start : start + 5_000] = rng.standard_normal((5_000, 256), np.float32)
        array.flush()
        del array
        code = [sys.executable, "-c", MEMORY, str(path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **malloc}
        done = subprocess.run(code, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        seen, peak = map(int, done.stdout.split())
        assert seen == count
        peaks.append(peak)
        path.unlink()
    assert peaks[1] - peaks[0] < 4_000, peaks


# ---- sources


def test_contexts_travel_with_their_samples():
    flow = Flow(bilip.models.real_nvp(2, blocks=2, hidden=(8,), context=3, scale="half_sigmoid"))
    x, context = torch.randn(50, 2), torch.randn(50, 3)
    record = bilip.audit(flow, (x, context), ood=["uniform", "scaled:2"], budget=replace(TINY, batch=16))
    for use in ("sampling", "likelihood", "ood-likelihood"):
        assert record.verdicts[use].status == "safe", record.verdicts[use]
    assert not record.find("map")
    assert all(m.measured for m in record.measurements), [m for m in record.measurements if not m.measured]
    assert record.find("sampling")[0]["count"] == 50


class Keyed(bilip.Bijection):
    """Raises unless each sample meets the context that belongs to it."""

    def forward(self, x, context=None):
        if context is None or not torch.equal(x[:, :1], context):
            raise ValueError("a sample met the context of another")
        return x

    def inverse(self, z, context=None):
        return self.forward(z, context)


def test_batches_slice_samples_and_contexts_together():
    x = torch.randn(50, 2)
    record = bilip.audit(Keyed(), (x, x[:, :1]), budget=replace(TINY, batch=7), probes=["reconstruction", "blame"])
    assert record.find("reconstruction")[0]["share_failed"] == 0
    assert record.find("reconstruction")[0]["relative_max"] == 0
    with pytest.raises(InputError, match="met the context of another"):
        bilip.audit(Keyed(), (x, x[:, :1].flip(0)), budget=TINY)


def test_a_missing_context_is_a_sentence():
    flow = Flow(bilip.models.real_nvp(2, blocks=2, hidden=(8,), context=3))
    with pytest.raises(InputError, match="source 'data'.*context"):
        bilip.audit(flow, torch.randn(8, 2))
    with pytest.raises(InputError, match="8 samples with 7 contexts"):
        bilip.audit(flow, (torch.randn(8, 2), torch.randn(7, 3)))


def test_a_source_goes_by_the_name_and_role_that_the_audit_gives_it():
    x = data.as_source("inner", torch.randn(8, 4))
    record = bilip.audit(affine_flow(), {"one": x, "two": x}, ood=["two"], budget=TINY, probes=["reconstruction"])
    assert [(s["name"], s["role"]) for s in record.sources] == [("one", "data"), ("two", "ood")]
    assert [m.source for m in record.measurements] == ["one", "two"]
    assert bilip.audit(affine_flow(), x, budget=TINY, probes="reconstruction").sources[0]["name"] == "inner"


def test_the_sources_that_differ_are_the_ones_named():
    same, other = torch.randn(8, 4), torch.randn(8, 3)
    with pytest.raises(InputError, match=r"'a' have shape \(4,\), those of 'b' \(3,\)"):
        bilip.audit(affine_flow(), {"a": same, "b": other, "c": same})


NO_TIMES = [0, -1, math.nan, math.inf, "60", True]


def test_arguments():
    flow, x = affine_flow(), torch.randn(8, 4)
    for options, says in (
        ({"budget": "huge"}, "'quick', 'standard', 'thorough'"),
        ({"probes": ["telepathy"]}, "unknown probe 'telepathy'"),
        ({"probes": "reconstruction,telepathy"}, "unknown probe 'telepathy'"),
        ({"ood": ["noise"]}, "neither the name of a source"),
        ({"seed": -1}, "seed=-1"),
        ({"bits": 0}, "bits=0"),
        *(({"time": time}, r"audit\(time=.*positive number of seconds") for time in NO_TIMES),
        ({"model": affine_flow().to("meta")}, "on the device meta, where tensors have no numbers"),
        ({"sources": {}}, "there is no source"),
    ):
        with pytest.raises(InputError, match=says):
            bilip.audit(**{"model": flow, "sources": x} | options)
    for bad in ({"share": 1.5}, {"relative": -1}, {"log_det": math.nan}, {"non_finite": "none"}):
        with pytest.raises(InputError, match="Thresholds"):
            Thresholds(**bad)


# ---- probes


class Mean(Probe):
    name = "mean"

    def __init__(self, fails=None):
        self.fails = fails

    def _measure(self, subject, source):
        if self.fails:
            raise self.fails
        torch.manual_seed(0)
        z = subject.forward(source.first(16, dtype=subject.dtype).x).value
        self.progress(1.0)
        return Measurement(self.name, source.name, values={"mean": z.mean()})


def test_an_own_probe_runs_on_every_source():
    shown = []
    record = bilip.audit(
        affine_flow(),
        {"a": torch.randn(8, 4), "b": torch.zeros(8, 4)},
        budget=TINY,
        probes=["reconstruction", Mean()],
        progress=lambda text, share: shown.append((text, share)),
    )
    assert [(m.probe, m.source) for m in record.measurements] == [
        ("reconstruction", "a"),
        ("reconstruction", "b"),
        ("mean", "a"),
        ("mean", "b"),
    ]
    assert record.settings["probes"] == ["reconstruction", "mean"]
    again = bilip.AuditRecord.from_json(record.to_json())
    assert again.find("mean", "b")[0]["mean"] == pytest.approx(float(record.find("mean", "b")[0]["mean"]))
    shares = [share for _, share in shown]
    assert shares == sorted(shares)
    assert shown[-1] == ("done", 1.0)
    assert ("mean on b", 1.0) in shown


def test_what_a_probe_raises_is_its_reason_and_the_others_still_run():
    flow, x = affine_flow(), torch.randn(8, 4)
    record = bilip.audit(flow, x, budget=TINY, probes=[Mean(bilip.errors.NotMeasured("too few"))])
    assert record.measurements[0].reason == "too few"
    record = bilip.audit(
        flow, x, budget=TINY, probes=["reconstruction", Mean(ZeroDivisionError("deep\ninside")), Mean()]
    )
    assert [m.reason for m in record.measurements] == ["", "ZeroDivisionError: deep inside", ""]


def test_ctrl_c():
    flow, x = affine_flow(), torch.randn(8, 4)
    probes = [Mean(), Mean(KeyboardInterrupt()), Mean()]
    with pytest.raises(KeyboardInterrupt):
        bilip.audit(flow.train(), x, budget=TINY, probes=probes)
    assert flow.training
    assert flow.bijection.training
    record = bilip.audit(flow, x, budget=TINY, probes=probes, keep_interrupted=True)
    assert [m.reason for m in record.measurements] == ["", "the audit was stopped here", "the audit was stopped before"]
    assert record.settings["stopped"] is True


# ---- models that end the program, time, and models without numbers


class Ends(bilip.Bijection):
    """The identity, until one of its methods ends the program."""

    def __init__(self, error, where, after=0):
        super().__init__()
        self.error, self.where, self.left = error, where, after

    def _there(self, name, value):
        if name == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error
        return value

    def forward(self, x, context=None):
        return self._there("forward", x)

    def inverse(self, z, context=None):
        return self._there("inverse", z)

    def forward_and_log_det(self, x, context=None):
        return self._there("log_det", x), x.new_zeros(len(x))

    def inverse_and_log_det(self, z, context=None):
        return self._there("log_det", z), z.new_zeros(len(z))


class Own(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("enough"), Own("own")], ids=repr)
def test_a_model_that_ends_the_program_at_once_is_refused(error):
    with pytest.raises(InputError, match=f"takes no batch.*{type(error).__name__}") as caught:
        bilip.audit(Ends(error, "forward"), torch.randn(8, 4), budget=TINY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", [SystemExit(0), Own("own")], ids=repr)
def test_an_inverse_that_ends_the_program_fails_its_samples_and_the_audit(error, after):
    record = bilip.audit(Ends(error, "inverse", after), torch.randn(8, 4), budget=TINY, probes=["reconstruction"])
    assert record.measurements[0]["share_failed"] == 1
    assert type(error).__name__ in record.measurements[0]["failure"]
    assert record.verdicts["inversion"].status == "unsafe"
    assert record.settings["ended"] == f"the model ended the program ({said_by(error)})"
    assert not record.passed("likelihood", not_measured="pass")


def test_what_a_probe_met_when_the_program_was_ended_is_its_reason():
    probes = [Mean(), Mean(SystemExit(0)), Mean()]
    record = bilip.audit(affine_flow(), torch.randn(8, 4), budget=TINY, probes=probes)
    assert [m.reason for m in record.measurements] == ["", "the model ended the program (SystemExit: 0)", ""]
    assert record.settings["ended"] == "the model ended the program (SystemExit: 0)"


@pytest.fixture
def clock(monkeypatch):
    """The seconds that audits see, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(sys.modules["bilip.auditing.audit"], "monotonic", lambda: now[0])
    return now


class Ticking(Probe):
    """Ten batches, of which the clock of the audit allows three."""

    name = "ticking"

    def __init__(self, clock, by):
        self.clock, self.by, self.done = clock, by, 0

    def _measure(self, subject, source):
        for k in range(10):
            self.clock[0] += 1.0
            if self.by == "progress":
                self.progress(k / 10)
            else:
                subject.forward(torch.zeros(1, 4))
            self.done += 1
        return Measurement(self.name, source.name, values={"batches": self.done})


class Stubborn(Ticking):
    """Swallows what it meets, and claims to be done."""

    def _measure(self, subject, source):
        try:
            return super()._measure(subject, source)
        except bilip.errors.NotMeasured:
            return Measurement(self.name, source.name, values={"batches": self.done})


@pytest.mark.parametrize("by", ["progress", "calls"])
@pytest.mark.parametrize("kind", [Ticking, Stubborn])
def test_the_time_is_looked_at_between_batches(clock, by, kind):
    probe = kind(clock, by)
    record = bilip.audit(affine_flow(), torch.randn(8, 4), budget=TINY, probes=[probe, Mean()], time=3.5)
    assert 2 <= probe.done <= 4
    assert [m.reason for m in record.measurements] == ["the time of 3.5 s was over"] * 2
    assert record.settings["time"] == 3.5
    assert record.settings["out_of_time"] is True
    assert {v.status.value for v in record.verdicts.values()} == {"not-measured"}
    assert kind(clock, by).measure(affine_flow(), torch.randn(8, 4))["batches"] == 10  # alone it has no clock
    assert probe.measure(affine_flow(), torch.randn(8, 4)).measured  # and neither has one that was in an audit


def test_the_search_for_guilty_samples_looks_at_the_time_too(clock):
    """A model that raises for some samples is called hundreds of times to find them."""

    class Picky(Ends):
        calls = 0

        def inverse(self, z, context=None):
            self.calls += 1
            clock[0] += 1.0
            if (z[:, 0] > 0).any():
                raise ValueError("too large")
            return z

    model, x = Picky(None, ""), torch.randn(64, 4).abs().neg()
    x[8:, 0] *= -1
    record = bilip.audit(model, x, budget=TINY, probes=["reconstruction"], time=12.0)
    assert model.calls <= 14
    assert record.measurements[0].reason == "the time of 12 s was over"


def test_what_was_measured_in_time_is_kept(clock):
    probes = ["reconstruction", Ticking(clock, "calls")]
    record = bilip.audit(affine_flow(), torch.randn(8, 4), budget=TINY, probes=probes, time=5)
    assert record.find("reconstruction")[0].measured
    assert not record.find("ticking")[0].measured
    assert bilip.audit(affine_flow(), torch.randn(8, 4), budget=TINY, probes=probes).settings["out_of_time"] is False


def test_what_libraries_say_to_their_developers_is_not_shown():
    class Old(Ends):
        def forward(self, x, context=None):
            warnings.warn("torch.old_solve is deprecated in favor of torch.new_solve", UserWarning, stacklevel=1)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bilip.audit(Old(None, ""), torch.randn(8, 4), budget=TINY, probes=["reconstruction"])


class Counting(bilip.Bijection):
    """A model that counts the samples it is given, by dtype."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, Counter()

    def __deepcopy__(self, memo):
        twin = Counting(copy.deepcopy(self.inner, memo))
        twin.rows = self.rows  # the float64 copy's samples are counted too
        return twin

    def _counted(self, call, x, context):
        self.rows[x.dtype] += len(x)
        return call(x, context)

    def forward(self, x, context=None):
        return self._counted(self.inner, x, context)

    def inverse(self, z, context=None):
        return self._counted(self.inner.inverse, z, context)

    def forward_and_log_det(self, x, context=None):
        return self._counted(self.inner.forward_and_log_det, x, context)

    def inverse_and_log_det(self, z, context=None):
        return self._counted(self.inner.inverse_and_log_det, z, context)


NEEDED = 640  # samples that exclude a share of 1 % when none of them is bad
PROBES = ["consistency", "reconstruction", "likelihood", "log_det", "sampling", "precision"]


def counted(size, samples, **options):
    """The samples that an audit gives to a flow, by dtype, and its record."""
    torch.manual_seed(0)
    model = Counting(bilip.models.real_nvp(size, blocks=2, hidden=(16,), coupling="additive"))
    x = torch.randn(samples, size, generator=torch.Generator().manual_seed(1))
    record = bilip.audit(bilip.Flow(model, shape=(size,)), x, budget="quick", **options)
    return model.rows, record


def spent(size, samples):
    rows, record = counted(size, samples, ood=["uniform", "gaussian"], probes=PROBES)
    for use in ("inversion", "sampling", "likelihood", "ood-likelihood"):
        assert record.verdicts[use].status.value == "safe"
    return rows


@pytest.mark.parametrize("samples", [2_000, 20_000])
def test_a_sound_flow_costs_a_few_passes_over_what_the_allowed_share_needs(samples):
    rows = spent(8, samples)
    # three sources, there and back, log p, samples, draws of the log-determinant
    assert rows[torch.float32] <= 30 * NEEDED
    jacobians = 3 * 256 * 8  # at 256 points of each source, for one opaque block
    assert rows[torch.float64] <= 10 * NEEDED + jacobians


def test_a_large_sound_flow_gets_few_references_in_float64():
    rows = spent(192, 2_000)
    assert rows[torch.float32] <= 30 * NEEDED
    jacobians = 3 * 2 * 2 * 192  # products at two points of each source, for two blocks
    # log p of every sample, since the nets are small, and a part of the draws; all of them would be 6 * NEEDED and more
    assert rows[torch.float64] <= 4 * NEEDED + 512 + jacobians


def test_norms_of_nets_are_computed_once_for_all_sources(monkeypatch):
    from bilip.nets import certify

    calls, compute = Counter(), certify._log_lipschitz

    def counted(net, shape, outputs):
        calls[id(net), shape, str(outputs)] += 1
        return compute(net, shape, outputs)

    monkeypatch.setattr(certify, "_log_lipschitz", counted)
    model = bilip.models.real_nvp(4, blocks=2, hidden=(8,))
    record = bilip.audit(model, torch.randn(64, 4), ood=["uniform"], budget="quick", probes=["bounds"])
    assert [m.measured for m in record.measurements] == [True, True]
    assert calls
    assert max(calls.values()) == 1


def test_a_log_density_that_draws_nothing_is_not_asked_twice_on_a_whole_batch():
    rows, _ = counted(192, 2_000, probes=["likelihood"])
    assert rows[torch.float32] <= 2 * NEEDED + 128  # once as it is, once with its input rounded anew


def test_audits_that_end_in_any_order_leave_os_exit_as_it_was(monkeypatch):
    def left(status):
        raise EOFError(status)

    monkeypatch.setattr(os, "_exit", left)
    audits = [staying(), staying()]
    for one in audits:
        one.__enter__()
    with pytest.raises(SystemExit):
        os._exit(0)
    for one in audits:
        one.__exit__(None, None, None)
    with pytest.raises(EOFError):
        os._exit(0)
