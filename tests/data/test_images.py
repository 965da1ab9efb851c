"""Labelled images: read in every form, as batches for training, and dequantized."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bilip.data import ImageBatches, Images, cell, cifar10, dequantize, load_images
from bilip.data.images import load_plain
from bilip.errors import InputError
from bilip.training import Draw

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
LABELS = [3, 0, 9, 1, 1, 5]


def binary(path, part):
    rows = [bytes([LABELS[k]]) + PIXELS[k].tobytes() for k in part]
    path.write_bytes(b"".join(rows))


def pickled(path, part, protocol=2, keys=bytes):
    batch = {"data": PIXELS[part].reshape(len(part), -1), "labels": [LABELS[k] for k in part], "batch_label": b"x"}
    if keys is bytes:
        batch = {k.encode(): v for k, v in batch.items()}
    path.write_bytes(pickle.dumps(batch, protocol=protocol))


def same(images, part):
    assert images.x.dtype == torch.uint8
    assert np.array_equal(images.x.numpy(), PIXELS[part])
    assert images.y.tolist() == [LABELS[k] for k in part]
    assert len(images) == len(part)


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_binary_batches(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    binary(folder / "data_batch_1.bin", [0, 1])
    binary(folder / "data_batch_2.bin", [2, 3, 4])
    binary(folder / "test_batch.bin", [5])
    same(cifar10(tmp_path), [0, 1, 2, 3, 4])
    same(cifar10(str(tmp_path), split="test"), [5])
    assert cifar10(tmp_path, split="test").classes[5] == "dog"


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])  # numpy writes protocol 5 through a function CIFAR-10 never used
@pytest.mark.parametrize("keys", [bytes, str])
def test_python_batches(tmp_path, protocol, keys):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pickled(folder / "data_batch_1", [0, 1, 2], protocol, keys)
    same(cifar10(tmp_path), [0, 1, 2])


def test_a_pickle_as_python_2_wrote_it(tmp_path):
    # Protocol 2 with byte strings (SHORT_BINSTRING, BINSTRING), as in the files that are distributed.
    data = PIXELS[:1].reshape(1, -1)
    raw = data.tobytes()
    program = (
        b"\x80\x02}q\x01(U\x04dataq\x02"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tbU\x06labels]K\x03au."
    )
    (tmp_path / "test_batch").write_bytes(program)
    same(cifar10(tmp_path, split="test"), [0])


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "pwned"),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_runs_nothing(tmp_path, protocol):
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": Attack(tmp_path)}, protocol=protocol))
    with pytest.raises(InputError, match="it asks for (posix|nt).mkdir, which is not run here"):
        cifar10(tmp_path, split="test")
    assert not (tmp_path / "pwned").exists()


FOREIGN = [
    b"",
    b"garbage",
    pickle.dumps([1, 2]),
    pickle.dumps({"data": np.array([None])}, protocol=2),
    pickle.dumps({"data": np.zeros(3, "U4")}, protocol=2),
    b"\x80\x02}q\x01(U\x04datacnumpy\ndtype\n(U\x02u1K\x00K\x01tRK\x01bu.",
    b"\x80\x02}(U\x04datacnumpy\nndarray\n)\x81u.",
]
# one thing remembered as number 2^31 - 1: gigabytes of empty places
FILLING = [b"\x80\x02}r\xff\xff\xff\x7f.", b"\x80\x02}r\xff\xff\xff\xff.", b"(dp2147483647\n."]


@pytest.mark.parametrize(
    ("content", "said"),
    [(one, "batch cannot be read as a plain pickle.*get it again") for one in FOREIGN]
    + [(one, "it remembers something as number") for one in FILLING],
)
def test_foreign_pickles_and_those_that_would_fill_the_memory(tmp_path, content, said):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_plain(tmp_path / "batch")


def test_truncated_pickles(tmp_path):
    pickled(tmp_path / "whole", [0])
    whole = (tmp_path / "whole").read_bytes()
    for cut in range(0, len(whole) - 1, 97):
        (tmp_path / "test_batch").write_bytes(whole[:cut])
        with pytest.raises(InputError, match="test_batch"):
            cifar10(tmp_path, split="test")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1]}, "no array 'data'"),
        ({"data": np.zeros((1, 5), np.uint8), "labels": [1]}, "no array 'data'"),
        ({"data": np.zeros((1, 3072)), "labels": [1]}, "no array 'data'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "no list 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [1, 2]}, "no list 'labels' of 1"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "expected 0 to 9"),
    ],
)
def test_wrong_batches(tmp_path, batch, message):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(InputError, match=message):
        cifar10(tmp_path, split="test")


def test_bad_cifar_folders(tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        cifar10(tmp_path / "none")
    with pytest.raises(InputError, match="holds no train images in a form that is known"):
        cifar10(tmp_path)
    with pytest.raises(InputError, match="expected 'train' or 'test'"):
        cifar10(tmp_path, split="val")
    (tmp_path / "test_batch.bin").write_bytes(bytes(3072))
    with pytest.raises(InputError, match="truncated or foreign"):
        cifar10(tmp_path, split="test")


def test_npz(tmp_path):
    np.savez_compressed(tmp_path / "cifar10_test.npz", x=PIXELS.transpose(0, 2, 3, 1), y=np.array(LABELS, np.uint8))
    same(cifar10(tmp_path, split="test"), range(6))
    np.savez(tmp_path / "first.npz", x=PIXELS)
    images = load_images(tmp_path / "first.npz")
    assert np.array_equal(images.x.numpy(), PIXELS)
    assert images.y is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 3, 4, 4))}, "expected uint8"),
        ({"x": np.zeros((2, 3), np.uint8)}, "expected uint8"),
        ({"x": np.zeros((2, 4, 4, 3), np.uint8), "y": np.zeros(3, np.int64)}, "expected 2 labels"),
        ({"x": np.zeros((2, 4, 4, 3), np.uint8), "y": np.zeros(2)}, "expected 2 labels"),
        ({"x": np.zeros((2, 4, 4, 3), np.uint8), "y": np.array([None, 1])}, "cannot be read"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load_images(tmp_path / "x.npz")


def test_image_folders(tmp_path):
    for k, name in enumerate(["train/cat/a.png", "train/cat/b.png", "train/airplane/a.png"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[k].transpose(1, 2, 0)).save(path)
    images = cifar10(tmp_path)
    assert images.classes == ("airplane", "cat")
    assert images.y.tolist() == [0, 1, 1]
    assert np.array_equal(images.x.numpy(), PIXELS[[2, 0, 1]])
    assert load_images(tmp_path / "train" / "cat").y is None
    with pytest.raises(InputError, match="neither a folder nor an .npz"):
        load_images(tmp_path / "x.png")


def test_a_pickle_cannot_change_the_functions_that_read_the_next_one(tmp_path):
    before = pickle.dumps({b"data": b"abc"}, protocol=0)
    change = b"c_codecs\nencode\n(N}U\x0c__defaults__(U\x05utf-8tstb."
    (tmp_path / "first").write_bytes(change)
    with pytest.raises(InputError, match="it changes a function"):
        load_plain(tmp_path / "first")
    (tmp_path / "second").write_bytes(before)
    assert load_plain(tmp_path / "second") == {b"data": b"abc"}


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


@given(bits=st.integers(1, 16), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_dequantized_levels_stay_in_their_cell(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(2**bits, (64, 3), generator=generator)
    levels[0, 0], levels[0, 1] = 0, 2**bits - 1
    x = dequantize(levels, bits, generator)
    assert x.dtype == torch.float32
    assert torch.equal((x.double() * 2**bits).floor().long(), levels)
    found = cell(x, bits)
    assert found.half == 0.5 / 2**bits
    assert torch.equal(found.center.double(), (levels.double() + 0.5) / 2**bits)
    assert bool(((x - found.center).abs() <= found.half).all())


def test_noise_that_would_round_into_the_next_cell(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2**-24))
    levels = torch.tensor([[65535.0]])
    assert float(dequantize(levels, 16)) < 1


def test_noise_is_uniform_and_seeded():
    levels = torch.zeros(100_000, 1, dtype=torch.uint8)
    x = dequantize(levels, 8, torch.Generator().manual_seed(0)) * 256
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * len(x))
    assert torch.equal(x, dequantize(levels, 8, torch.Generator().manual_seed(0)) * 256)


@pytest.mark.parametrize(
    ("levels", "bits", "message"),
    [
        (torch.tensor([256]), 8, "expected 0 to 255"),
        (torch.tensor([-1]), 8, "levels run from -1"),
        (torch.tensor([200], dtype=torch.uint8), 5, "pixels // 8"),
        (torch.tensor([0.5]), 8, "whole numbers"),
        (torch.tensor([math.nan]), 8, "whole numbers"),
        (torch.tensor([True]), 8, "torch.bool"),
        (torch.tensor([0]), 0, "from 1 to 16"),
        (torch.tensor([0]), 2.0, "from 1 to 16"),
    ],
)
def test_bad_levels(levels, bits, message):
    with pytest.raises(InputError, match=message):
        dequantize(levels, bits)


@pytest.mark.parametrize("x", [torch.tensor([1.0]), torch.tensor([-1e-9]), torch.tensor([math.nan]), torch.tensor([0])])
def test_cell_wants_the_unit_interval(x):
    with pytest.raises(InputError, match=r"\[0, 1\)"):
        cell(x)
