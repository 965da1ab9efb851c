"""What `audit` says about stock blocks of other libraries, at their default initialisation, over several seeds."""

import pytest
import torch

import bilip
import stacks
from bilip.probes import Reconstruction, Subject

pytestmark = pytest.mark.numeric

PROBES = ["consistency", "reconstruction", "log_det", "blame"]


def verdicts(model, x, scale=10.0):
    record = bilip.audit(model, {"normal": x}, ood=[f"scaled:{scale:g}"], budget="quick", probes=PROBES)
    return {use: verdict.status.value for use, verdict in record.verdicts.items()}, record


@pytest.mark.parametrize("seed", range(3))
def test_freia_glow_is_unsafe_and_a_block_is_named(seed):
    pytest.importorskip("FrEIA")
    torch.manual_seed(seed)
    found, record = verdicts(stacks.freia("GLOWCouplingBlock", 32), torch.randn(512, 8))
    assert found["likelihood"] == found["ood-likelihood"] == "unsafe"
    m = record.find("reconstruction", "normal")[0]
    assert m["share_wrong"] > 0.5
    assert m["share_nan"] + m["share_inf"] == 0  # finite, and meaningless: a count of NaN would miss it
    blame = record.find("blame", "normal")[0]
    assert blame["guilty"]
    assert blame["guilty_kind"] == "GLOWCouplingBlock"


@pytest.mark.parametrize("seed", range(3))
def test_freia_nice_is_safe(seed):
    pytest.importorskip("FrEIA")
    torch.manual_seed(seed)
    found, _ = verdicts(stacks.freia("NICECouplingBlock", 32), torch.randn(512, 8))
    assert found["likelihood"] == found["ood-likelihood"] == "safe"


@pytest.mark.parametrize("seed", range(3))
def test_normflows_exp_is_unsafe(seed):
    pytest.importorskip("normflows")
    torch.manual_seed(seed)
    found, record = verdicts(stacks.normflows_coupling("exp", 32), torch.randn(512, 8))
    assert found["likelihood"] == found["ood-likelihood"] == "unsafe"
    assert record.find("reconstruction", "normal")[0]["share_nan"] > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_pyro_coupling_is_flagged_although_nothing_is_nan(seed):
    pytest.importorskip("pyro")
    torch.manual_seed(seed)
    found, record = verdicts(stacks.pyro_coupling(16), torch.randn(512, 8))
    m = record.find("reconstruction", "normal")[0]
    assert m["share_nan"] == m["share_inf"] == m["share_failed"] == 0
    assert found["likelihood"] == found["ood-likelihood"] == "unsafe"


@pytest.mark.parametrize("seed", range(5))
def test_zuko_real_nvp_is_safe_on_its_data_and_unsafe_outside(seed):
    pytest.importorskip("zuko")
    torch.manual_seed(seed)
    found, _ = verdicts(stacks.zuko_real_nvp(16), torch.randn(512, 8))
    assert found["likelihood"] == "safe"
    assert found["ood-likelihood"] == "unsafe"


@pytest.mark.slow
def test_an_assertion_in_an_nflows_spline_is_located_to_its_samples():
    pytest.importorskip("nflows")
    subject = Subject.of(model := stacks.nflows_spline(8).eval())
    for _ in range(30):  # some two of ten thousand raise, others on another CPU
        x = 100 * torch.randn(4_000, 8)
        z = subject.forward(x).value
        try:
            with torch.no_grad():
                subject.bijection.inverse(z)
        except AssertionError:
            break
    outcome = subject.inverse(z)
    assert 0 < int(outcome.failed.sum()) < 20
    assert outcome.exact
    assert "AssertionError" in outcome.message
    assert "discriminant" in outcome.message
    good = int((~outcome.failed).nonzero()[0])
    with torch.no_grad():
        rest = torch.where(outcome.failed[:, None], z[good], z)
        assert torch.equal(subject.bijection.inverse(rest)[~outcome.failed], outcome.value[~outcome.failed])
        for k in outcome.failed.nonzero().flatten().tolist():  # each alone among good ones makes it raise
            one = z[good].repeat(len(z), 1)
            one[k] = z[k]
            with pytest.raises(AssertionError):
                subject.bijection.inverse(one)
    m = Reconstruction(batch=len(x), rounds=1).measure(model, x)
    assert m["share_failed"] * len(x) == pytest.approx(int(outcome.failed.sum()))
    assert {row["sample"] for row in m.rows} >= set(outcome.failed.nonzero().flatten().tolist()[:8])
