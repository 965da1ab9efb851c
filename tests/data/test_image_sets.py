"""Image sets by name: every form people have, and what is refused."""

import dataclasses
import hashlib
import json
import pickle
import sys
import types

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from bilip.data import IMAGE_SETS, as_source, image_set, prepare_images
from bilip.data import image_sets as module
from bilip.errors import InputError, MissingExtra
from in_process import command_line

DRAW = np.random.default_rng(0)


def pixels(count, side=32):
    return DRAW.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def test_what_was_prepared_is_found_by_name(tmp_path, monkeypatch):
    x, y = pixels(5), np.array([3, 1, 4, 1, 5])
    (tmp_path / "from").mkdir()
    np.savez(tmp_path / "from" / "cifar10_train.npz", x=x, y=y)
    np.savez(tmp_path / "from" / "test.npz", x=x[:2].transpose(0, 3, 1, 2), y=y[:2])
    facts = prepare_images("cifar10", tmp_path / "from", tmp_path / "to")
    assert facts["splits"]["train"]["count"] == 5
    assert facts["splits"]["train"]["of"] == 50_000
    assert facts["splits"]["train"]["checksums"] is None
    assert json.loads((tmp_path / "to" / "cifar10" / "set.json").read_text())["splits"] == facts["splits"] | {
        split: value | {"classes": list(value["classes"])} for split, value in facts["splits"].items()
    }
    found = image_set("cifar10", "train", tmp_path / "to")
    assert np.array_equal(found.x.numpy(), x.transpose(0, 3, 1, 2))
    assert found.y.tolist() == y.tolist()
    assert found.classes[3] == "cat"
    assert len(image_set("cifar10", "test", tmp_path / "to")) == 2
    monkeypatch.setenv("BILIP_DATA", str(tmp_path / "to"))
    assert len(image_set("cifar10")) == 5
    source = as_source("pets", "cifar10:test")
    assert (source.count, source.shape) == (2, (3, 32, 32))
    assert "cifar10" in repr(source)


def test_binary_batches_and_their_checksums(tmp_path, monkeypatch):
    records = DRAW.integers(0, 10, (4, 3073), dtype=np.uint8)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    records.tofile(path)
    md5 = hashlib.md5(records.tobytes()).hexdigest()
    known = dataclasses.replace(IMAGE_SETS["cifar10"], counts={"train": 50_000, "test": 4}, md5={"test": (md5,)})
    monkeypatch.setattr(module, "IMAGE_SETS", {"cifar10": known})
    assert len(image_set("cifar10", "test", tmp_path)) == 4
    assert prepare_images("cifar10", tmp_path, tmp_path / "to")["splits"]["test"]["checksums"] is True
    records[2, 1000] ^= 1
    records.tofile(path)
    with pytest.raises(InputError, match=r"test_batch.bin is not test_batch .* have another checksum"):
        image_set("cifar10", "test", tmp_path)


def test_a_file_that_is_there_twice_is_no_whole_set(tmp_path, monkeypatch):
    records = DRAW.integers(0, 10, (6, 3073), dtype=np.uint8)
    md5 = tuple(hashlib.md5(records[k : k + 2].tobytes()).hexdigest() for k in (0, 2, 4))
    known = dataclasses.replace(IMAGE_SETS["cifar10"], counts={"train": 6}, md5={"train": md5})
    monkeypatch.setattr(module, "IMAGE_SETS", {"cifar10": known})
    monkeypatch.setattr(module, "BATCH", 2)
    for k in (1, 2, 3):
        records[2 * k - 2 : 2 * k].tofile(tmp_path / f"data_batch_{k}.bin")
    assert len(image_set("cifar10", "train", tmp_path)) == 6
    (tmp_path / "data_batch_2.bin").unlink()
    assert prepare_images("cifar10", tmp_path, tmp_path / "to")["splits"]["train"]["checksums"] is True
    records[:2].tofile(tmp_path / "data_batch_3.bin")
    with pytest.raises(InputError, match=r"data_batch_3.bin is not .*: it holds the images of data_batch_1"):
        prepare_images("cifar10", tmp_path, tmp_path / "to")
    twice = records[[0, 1, 2, 3, 0, 1]]
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "train.npz", x=twice[:, 1:].reshape(-1, 3, 32, 32), y=twice[:, 0])
    with pytest.raises(InputError, match="there twice"):
        image_set("cifar10", "train", tmp_path / "npz")


@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: np.concatenate((r[:1000], r[1000:1001] ^ 1, r[1001:])),
            "have another checksum",
        ),  # also another label
        (lambda r: r[:9000], "its 9,000 images"),
    ],
)
def test_every_batch_is_what_its_name_says(tmp_path, suffix, change, said):
    """Whatever the other files are: the known checksums are those of the published files."""
    records = change(np.zeros((10_000, 3073), np.uint8))
    path = tmp_path / f"data_batch_2{suffix}"
    if suffix:
        path.write_bytes(records.tobytes())
    else:
        path.write_bytes(pickle.dumps({"data": records[:, 1:].copy(), "labels": records[:, 0].tolist()}, protocol=2))
    with pytest.raises(InputError, match=rf"data_batch_2{suffix} is not data_batch_2 of CIFAR-10 as published.*{said}"):
        prepare_images("cifar10", tmp_path, tmp_path / "to")


def pictures(folder, count):
    folder.mkdir(parents=True)
    for k in range(count):
        Image.fromarray(pixels(1)[0]).save(folder / f"{k}.png")


def test_parts_of_a_set_are_not_mixed(tmp_path):
    pictures(tmp_path / "archive" / "train" / "n01" / "images", 3)
    pictures(tmp_path / "archive" / "test" / "images", 4)
    for name in ("places", "textures", "celeba64"):
        with pytest.raises(
            InputError, match=r"archive holds images in folders test and train.*get .*(places2|dtd|celeba)"
        ):
            prepare_images(name, tmp_path / "archive", tmp_path / "to")
    pictures(tmp_path / "archive" / "val" / "images", 2)
    assert prepare_images("tiny_imagenet", tmp_path / "archive", tmp_path / "to")["splits"]["test"]["count"] == 2
    (tmp_path / "archive").rename(tmp_path / "tiny_imagenet")
    assert len(image_set("tiny_imagenet", folder=tmp_path)) == 2
    with pytest.raises(InputError, match="in folders test and train"):  # one below
        prepare_images("places", tmp_path, tmp_path / "to")


def test_a_whole_set_may_come_in_another_order(tmp_path, monkeypatch):
    x, y = pixels(6), np.array([3, 1, 4, 1, 5, 9])
    records = np.concatenate((y[:, None].astype(np.uint8), x.transpose(0, 3, 1, 2).reshape(6, -1)), 1)
    each = sorted(hashlib.md5(record.tobytes()).digest() for record in records)
    known = dataclasses.replace(
        IMAGE_SETS["cifar10"],
        counts={"train": 6, "test": 1},
        md5={"train": (hashlib.md5(records.tobytes()).hexdigest(),)},
        unordered={"train": hashlib.md5(b"".join(each)).hexdigest()},
    )
    monkeypatch.setattr(module, "IMAGE_SETS", {"cifar10": known})
    monkeypatch.setattr(module, "BATCH", 6)
    for name in module.CIFAR10_CLASSES:
        (tmp_path / "train" / name).mkdir(parents=True)
    for k, label in enumerate(y):
        Image.fromarray(x[k]).save(tmp_path / "train" / module.CIFAR10_CLASSES[label] / f"{k}.png")
    assert prepare_images("cifar10", tmp_path, tmp_path / "to")["splits"]["train"]["checksums"] is True
    assert len(image_set("cifar10", "train", tmp_path / "to")) == 6
    x[2, 5, 5, 1] ^= 1
    Image.fromarray(x[2]).save(tmp_path / "train" / "deer" / "2.png")
    with pytest.raises(InputError, match="theirs is another"):
        prepare_images("cifar10", tmp_path, tmp_path / "to")


def test_folders_of_some_classes_keep_the_numbers_of_the_set(tmp_path):
    for name in ("cat", "airplane"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(pixels(1)[0]).save(tmp_path / "train" / name / "0.png")
    prepare_images("cifar10", tmp_path, tmp_path / "to")
    found = image_set("cifar10", "train", tmp_path / "to")
    assert [found.classes[k] for k in found.y] == ["airplane", "cat"]
    (tmp_path / "train" / "cat").rename(tmp_path / "train" / "cats")
    with pytest.raises(InputError, match="'cats' is no class"):
        prepare_images("cifar10", tmp_path, tmp_path / "other")


def test_classes_behind_links_belong_to_the_set(tmp_path):
    for name in ("cat", "airplane"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels(1)[0]).save(tmp_path / name / "0.png")
    train = tmp_path / "from" / "cifar10" / "train"
    train.mkdir(parents=True)
    (tmp_path / "cat").rename(train / "cat")
    (train / "airplane").symlink_to(tmp_path / "airplane")
    assert len(image_set("cifar10", "train", tmp_path / "from")) == 2


@pytest.mark.parametrize("damage", ["flip", "labels", "fractions"])
def test_damaged_mat_files(tmp_path, damage):
    digits = DRAW.integers(1, 11, (20, 1)) + {"labels": 20, "fractions": 0.5}.get(damage, 0)
    path = tmp_path / "test_32x32.mat"
    scipy.io.savemat(path, {"X": pixels(20).transpose(1, 2, 3, 0), "y": digits}, do_compression=True)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= damage == "flip"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a file of SVHN"):
        image_set("svhn", folder=tmp_path)


@pytest.mark.parametrize(("mode", "side"), [("1", 20_000), ("I;16", 40)])
def test_pictures_that_are_no_bytes_or_fill_the_memory(tmp_path, mode, side):
    Image.new(mode, (side, side)).save(tmp_path / "0.png")
    with pytest.raises(InputError, match="0.png"):
        prepare_images("places", tmp_path, tmp_path / "to")


def test_mat_files_of_svhn(tmp_path):
    from scipy.io import savemat

    x = pixels(3)
    savemat(tmp_path / "test_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9]])})
    found = image_set("svhn", folder=tmp_path)
    assert np.array_equal(found.x.numpy(), x.transpose(0, 3, 1, 2))
    assert found.y.tolist() == [0, 1, 9]
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(InputError, match=r"test_32x32.mat is not a file of SVHN"):
        image_set("svhn", folder=tmp_path)


def test_pictures_of_any_size_are_cut_and_averaged(tmp_path):
    for kind, size in (("bubbly", (80, 64)), ("woven", (64, 100))):
        (tmp_path / "images" / kind).mkdir(parents=True)
        picture = np.zeros((size[1], size[0], 3), np.uint8)
        top, left = (size[1] - 64) // 2, (size[0] - 64) // 2
        picture[top : top + 64, left : left + 64] = np.repeat(np.repeat(pixels(1)[0], 2, 0), 2, 1)
        Image.fromarray(picture).save(tmp_path / "images" / kind / "a.png")
    found = image_set("textures", folder=tmp_path) if (tmp_path / "textures").exists() else None
    assert found is None
    with pytest.raises(InputError, match="looked for"):  # pictures are looked for in a folder of the set's name alone
        image_set("textures", folder=tmp_path)
    prepare_images("textures", tmp_path / "images", tmp_path)
    found = image_set("textures", folder=tmp_path)
    assert found.x.shape == (2, 3, 32, 32)
    assert found.y.tolist() == [0, 1]
    whole = np.asarray(Image.open(tmp_path / "images" / "bubbly" / "a.png"))[:, 8:72].transpose(2, 0, 1)
    assert np.array_equal(found.x[0].numpy(), whole[:, ::2, ::2])
    assert not found.x[0].eq(0).all(dim=0)[:, 0].all()  # what was cut off was black
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "woven" / "b.png", "GIF")  # another format by that name
    with pytest.raises(InputError, match=r"b.png is not a readable image"):
        prepare_images("textures", tmp_path / "images", tmp_path)
    (tmp_path / "images" / "woven" / "b.png").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"b.png is not a readable image"):
        prepare_images("textures", tmp_path / "images", tmp_path)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((2, 28, 28, 3), np.uint8)}, r"shape \(3, 28, 28\), expected \(3, 32, 32\)"),
        ({"x": np.zeros((10_001, 32, 32, 3), np.uint8)}, "10001 images, expected 1 to 10000"),
        ({"x": np.zeros((2, 32, 32, 3), np.uint8), "y": np.array([0, 10])}, "labels 0 to 10, expected 0 to 9"),
        ({"x": np.zeros((0, 32, 32, 3), np.uint8)}, "0 images"),
        ({"x": np.zeros((2, 32, 32, 3), np.uint8)}, "no labels; expected an array 'y'"),
        ({"x": np.zeros((10_000, 32, 32, 3), np.uint8), "y": np.zeros(10_000, int)}, "theirs is another"),
    ],
)
def test_something_else_of_that_name(tmp_path, arrays, said):
    path = tmp_path / "cifar10_test.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=rf"{path}.*{said}"):
        image_set("cifar10", "test", tmp_path)


def test_what_is_missing(tmp_path):
    with pytest.raises(
        InputError, match=r"no train images of cifar10 .*data_batch_1.*Get cifar-10-binary.*bilip data cifar10 --from"
    ):
        image_set("cifar10", "train", tmp_path / "none")
    with pytest.raises(InputError, match="there is no image set 'mnist': expected cifar10, svhn"):
        image_set("mnist")
    with pytest.raises(InputError, match="textures has no split 'train'"):
        image_set("textures", "train")
    with pytest.raises(InputError, match="holds no images of svhn"):
        prepare_images("svhn", tmp_path)


def test_through_hugging_face(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return [{"image": Image.fromarray(picture), "label": k} for k, picture in enumerate(pixels(2))]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    facts = prepare_images("svhn", None, tmp_path)
    assert asked[0] == ("ufldl-stanford/svhn", "cropped_digits", "test")
    assert facts["splits"]["test"]["count"] == 2
    assert image_set("svhn", folder=tmp_path).y.tolist() == [0, 1]

    def fails(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fails))
    with pytest.raises(InputError, match=r"could not be fetched .*no route.*--from FOLDER"):
        prepare_images("cifar10", None, tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match="pip install datasets"):
        prepare_images("cifar10", None, tmp_path)
    with pytest.raises(InputError, match="places cannot be fetched"):
        prepare_images("places", None, tmp_path)


def test_the_command(tmp_path, monkeypatch, capfd):
    np.savez(tmp_path / "svhn.npz", x=pixels(2), y=np.arange(2))
    run, to = command_line(monkeypatch, capfd), str(tmp_path / "to")
    code, out, err = run("data", "svhn", "--from", str(tmp_path), "--to", to)
    assert code == 0, err
    assert "svhn test: 2 images, a part of 26,032" in out
    assert torch.equal(image_set("svhn", folder=to).y, torch.arange(2))
    listed = run("data", "--to", to)[1]
    assert all(name in listed for name in IMAGE_SETS)
    code, _, err = run("data", "svhn", "--from", str(tmp_path / "nowhere"))
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'nowhere'} does not exist" in err


def test_a_set_that_is_prepared_in_two_turns_is_described_whole(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        (tmp_path / f"of {split}").mkdir()
        np.savez(tmp_path / f"of {split}" / f"{split}.npz", x=pixels(count), y=np.arange(count))
        prepare_images("svhn", tmp_path / f"of {split}", tmp_path)
    described = tmp_path / "svhn" / "set.json"
    assert {k: v["count"] for k, v in json.loads(described.read_text())["splits"].items()} == {"train": 3, "test": 2}
    (tmp_path / "svhn" / "train.npz").unlink()  # no longer there
    for before in (described.read_text(), "{", "[]", '{"splits": 3}', '{"splits": []}'):
        described.write_text(before)
        assert list(prepare_images("svhn", tmp_path / "of test", tmp_path)["splits"]) == ["test"]
        assert list(json.loads(described.read_text())["splits"]) == ["test"]


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    np.savez(tmp_path / "svhn.npz", x=pixels(2), y=np.arange(2))
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        prepare_images("svhn", tmp_path, tmp_path / "to")
    assert not list((tmp_path / "to" / "svhn").iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [("none", "does not exist"), ("c.tar.gz", "is an archive: unpack it"), ("x.npz", "is a file: expected the folder")],
)
def test_what_is_no_folder(tmp_path, name, said):
    if name != "none":
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=f"--from {tmp_path / name} {said}"):
        prepare_images("cifar10", tmp_path / name, tmp_path / "to")
