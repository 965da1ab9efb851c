"""Batches of images, drawn and augmented where the images are."""

import pytest
import torch

from bilip.data import ImageBatches, Images
from bilip.errors import InputError
from bilip.training import Draw


def make(count=20, size=6, **options):
    x = torch.randint(1, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageBatches(Images(x, torch.arange(count)), size, **options), x


def test_every_image_is_some_shifted_and_mirrored_one(device):
    batches, x = make(pad=2, device=device)
    mirrored, shifted = 0, set()
    for step in range(9):
        found, labels = batches(Draw(5, step))
        assert found.shape == (6, 3, 8, 8)
        for image, label in zip(found.mul(255).round().to(torch.uint8).cpu(), labels, strict=True):
            padded = torch.nn.functional.pad(x[label], (2, 2, 2, 2))
            ways = [
                (flip, down, right)
                for flip in (False, True)
                for down in range(5)
                for right in range(5)
                if torch.equal(image, _cut(padded, down, right, flip))
            ]
            assert len(ways) == 1
            mirrored += ways[0][0]
            shifted.add(ways[0][1:])
    assert 10 < mirrored < 44
    assert len(shifted) > 15


def _cut(padded, down, right, flip):
    cut = padded[:, down : down + 8, right : right + 8]
    return cut.flip(2) if flip else cut


def test_an_epoch_has_each_image_once_and_its_own_order():
    batches, _ = make()
    epochs = [torch.cat([batches(Draw(0, 3 * e + k))[1] for k in range(3)]).tolist() for e in range(2)]
    assert batches.per_epoch == 3
    assert all(len(set(epoch)) == 18 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != torch.cat([batches(Draw(1, k))[1] for k in range(3)]).tolist()


def test_a_batch_depends_on_seed_and_step_alone():
    one, two = make()[0], make()[0]
    for step in (7, 2, 7, 0):
        one(Draw(3, step))
    assert all(torch.equal(a, b) for a, b in zip(one(Draw(3, 4)), two(Draw(3, 4)), strict=True))


def test_normalised():
    mean, std = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
    batches, x = make(mean=mean, std=std)
    found, labels = batches.plain(3, 30)
    expected = (x[3:].double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[
        :, None, None
    ]
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert labels.tolist() == list(range(3, 20))
    assert found.is_contiguous()


def test_no_augmentation():
    batches, x = make(pad=0, flip=False)
    found, labels = batches(Draw(0, 1))
    assert torch.equal(found.mul(255).round().to(torch.uint8), x[labels])


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"size": 21}, {"pad": -1}, {"mean": (0.0,)}, {"std": (1.0, 0.0, 1.0)}]
)
def test_bad_options(options):
    with pytest.raises(InputError, match="ImageBatches"):
        make(**options)
    with pytest.raises(InputError, match="no labels"):
        ImageBatches(Images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), 1)
