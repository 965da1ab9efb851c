import pytest
import torch

from bilip import models
from bilip.blocks import InvertibleConv1x1, Permutation
from bilip.errors import InputError
from bilip.nets import log_lipschitz


@pytest.mark.parametrize(
    ("coupling", "mixing", "millions"),
    [
        ("additive", "conv1x1", 6.08),
        ("additive", "shuffle", 5.46),
        ("affine", "conv1x1", 8.41),
        ("affine", "shuffle", 7.78),
    ],
)
def test_trunks_have_the_papers_parameter_counts(coupling, mixing, millions):
    trunk = models.glow((3, 32, 32), levels=3, blocks=16, hidden=128, coupling=coupling, mixing=mixing)
    assert round(sum(p.numel() for p in trunk.parameters()) / 1e6, 2) == millions
    head = models.classifier(trunk).head
    assert sum(p.numel() for p in head.parameters()) == 36_874


def test_classifier_gives_everything_in_one_pass():
    trunk = models.glow((3, 8, 8), levels=2, blocks=1, hidden=4)
    model = models.classifier(trunk, classes=7)
    x = torch.randn(6, 3, 8, 8)
    model(x)
    model.eval()
    out = model.detailed(x)
    assert out.logits.shape == (6, 7)
    assert torch.allclose(out.logits, model(x))
    assert torch.allclose(trunk.inverse(out.latent), x, atol=1e-4)
    assert out.log_det.shape == (6,)


@pytest.mark.parametrize("mixing", ["reverse", "shuffle", "conv1x1"])
def test_mixing(mixing):
    trunk = models.glow((2, 4, 4), levels=1, blocks=2, hidden=4, mixing=mixing)
    kinds = [type(block) for block in trunk]
    assert (InvertibleConv1x1 if mixing == "conv1x1" else Permutation) in kinds


def test_lipschitz_holds_every_net_and_bounds_the_network():
    trunk = models.glow(
        (3, 8, 8), levels=2, blocks=2, hidden=8, coupling="additive", mixing="shuffle", actnorm=None, lipschitz=0.25
    )
    with torch.no_grad():
        for p in trunk.parameters():
            p.mul_(30)
    for block in trunk:
        if hasattr(block, "t"):
            assert log_lipschitz(block.t) <= torch.tensor(0.25).log().item()
    limit = ((0.25 + (0.25**2 + 4) ** 0.5) / 2) ** 4
    assert trunk.bounds().inverse <= limit * 1.0001


def test_multi_scale_latent_is_flat_and_complete():
    flow = models.glow((3, 16, 16), levels=3, blocks=1, hidden=4, factor_out=True)
    x = torch.randn(2, 3, 16, 16)
    z, log_det = flow.forward_and_log_det(x)
    assert z.shape == (2, 3 * 256)
    assert log_det.shape == (2,)
    assert torch.allclose(flow.inverse(z), x, atol=1e-3)
    plain = models.glow((3, 16, 16), levels=3, blocks=1, hidden=4)
    assert plain(x).shape == (2, 192, 2, 2)


def test_the_learned_prior_can_be_bounded():
    from bilip.blocks.scale import EXP, TanhExpScale

    def prior(**options):
        chain = models.glow((3, 8, 8), levels=2, blocks=1, hidden=4, factor_out=True, **options)
        return [block for block in chain if hasattr(block, "scale")][-1].scale, chain

    assert prior()[0] == EXP
    scale, chain = prior(prior_scale=TanhExpScale(clamp=3.0))
    assert scale == TanhExpScale(clamp=3.0)
    x = torch.randn(4, 3, 8, 8)
    z, log_det = chain.forward_and_log_det(x)
    assert torch.allclose(chain.inverse(z), x, atol=1e-4)
    assert log_det.shape == (4,)
    again = models.checkpoint.build(chain.config, tensors=100, numbers=10**6)
    assert [block.scale for block in again if hasattr(block, "scale")][-1] == scale


def test_odd_channels():
    trunk = models.glow((1, 6, 6), levels=1, blocks=1, hidden=4)
    assert trunk(torch.randn(2, 1, 6, 6)).shape == (2, 4, 3, 3)
    vectors = models.real_nvp(5, blocks=3, actnorm=True)
    assert vectors(torch.randn(8, 5)).shape == (8, 5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: models.glow((3, 30, 32), levels=2), "divisible by 4"),
        (lambda: models.glow((3, 32), levels=1), r"expected \(C, H, W\)"),
        (lambda: models.glow((3, 8, 8), coupling="cubic"), "'affine' or 'additive'"),
        (lambda: models.glow((3, 8, 8), mixing="stir"), "'conv1x1', 'shuffle' or 'reverse'"),
        (lambda: models.glow((3, 8, 8), actnorm="maybe"), "'data', 'identity' or None"),
        (lambda: models.glow((3, 8, 8), blocks=0), "blocks=0"),
        (lambda: models.glow((3, 8, 8), context=1), "levels=1"),
        (lambda: models.real_nvp(1), "2 features or more"),
        (lambda: models.real_nvp(4, scale="abs"), "is not known"),
        (lambda: models.classifier(torch.nn.Linear(2, 2)), "must be a Bijection"),
        (lambda: models.classifier(models.real_nvp(2), classes=1), "2 or more"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("make", [models.residual_flow, models.real_nvp])
def test_a_vector_is_given_by_its_size_or_its_shape(make, tmp_path):
    torch.manual_seed(0)
    one = make(2, blocks=2, hidden=(8,))
    torch.manual_seed(0)
    other = make((2,), blocks=2, hidden=(8,)).eval()
    x = torch.randn(5, 2)
    assert torch.equal(one.eval()(x), other(x))
    models.save(other, tmp_path / "saved")
    assert torch.equal(models.load(tmp_path / "saved").eval()(x), other(x))
    with pytest.raises(InputError):
        make((2, 3))
