"""Image sets by name: what they are, where they are looked for, and whether they are whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilip.data.files import image_files, open_image, pillow
from bilip.data.images import BATCHES, CIFAR10_CLASSES, Images, cifar10_batches, labelled, load_images
from bilip.errors import DataNotFound, InputError, MissingExtra, said_by

__all__ = ["IMAGE_SETS", "ImageSet", "data_folder", "image_set", "prepare_images"]

BATCH = 10_000  # images in a file of CIFAR-10, for which there are checksums


@dataclass(frozen=True)
class ImageSet:
    """What is known of a set.

    Attributes:
        name: On the command line.
        title: What it is.
        side: Height and width of its images here; larger ones are cut to their centre square and averaged.
        counts: Images in each split of the whole set; the first split is the usual one.
        how: How to get it.
        classes: Names of the labels, where they are few.
        within: The folder of an unpacked archive that holds its images, where there are others beside it.
        crop: Side of the centre square that is cut out; `None` for the shorter side.
        hub: Its name on Hugging Face, the configuration, the columns of images and labels, and the name of each split there.
        md5: Of each 10,000 images of a split, labels and pixels as in the binary files, where known.
        unordered: Of a whole split in whatever order: the MD5 of the sorted MD5s of its images, each with its label, where known.

    Example:
        >>> IMAGE_SETS["svhn"].counts["test"]
        26032
    """

    name: str
    title: str
    side: int
    counts: Mapping[str, int]
    how: str
    classes: tuple[str, ...] | None = None
    within: str | None = None
    crop: int | None = None
    hub: tuple[str, str | None, str, str | None, Mapping[str, str]] | None = None
    md5: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unordered: Mapping[str, str] = field(default_factory=dict)

    @property
    def split(self) -> str:
        """The usual split."""
        return next(iter(self.counts))


_BOTH = {"train": "train", "test": "test"}
IMAGE_SETS: Mapping[str, ImageSet] = {
    each.name: each
    for each in (
        ImageSet(
            "cifar10",
            "CIFAR-10, all ten classes",
            32,
            {"train": 50_000, "test": 10_000},
            "cifar-10-binary.tar.gz or cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html, unpacked",
            CIFAR10_CLASSES,
            hub=("uoft-cs/cifar10", None, "img", "label", _BOTH),
            md5={
                "train": (
                    "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "5ea93a67294ea407fff1d09f752e9692",
                    "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "53f37980c15c3d472c316c40844f3f0d",
                ),
                "test": ("803d5f7f4d78ea53de84dbe85f74fb6d",),
            },
            unordered={"train": "4d941ed38b4cfbad3461e69b65fbf77c", "test": "5c541f6619e05a6b3e6c4b873d02048d"},
        ),
        ImageSet(
            "svhn",
            "Street View House Numbers, cropped digits",
            32,
            {"test": 26_032, "train": 73_257},
            "test_32x32.mat and train_32x32.mat from ufldl.stanford.edu/housenumbers",
            tuple("0123456789"),
            hub=("ufldl-stanford/svhn", "cropped_digits", "image", "label", _BOTH),
        ),
        ImageSet(
            "textures",
            "Describable Textures",
            32,
            {"test": 5_640},
            "dtd-r1.0.1.tar.gz from www.robots.ox.ac.uk/~vgg/data/dtd, its folder images",
            within="images",
            hub=("tanganke/dtd", None, "image", "label", {"test": "train+test"}),
        ),
        ImageSet(
            "places",
            "Places",
            32,
            {"test": 10_000},
            "validation images of MiniPlaces or Places365 from places2.csail.mit.edu, as a folder",
            within="val",
        ),
        ImageSet(
            "tiny_imagenet",
            "tinyImageNet, validation",
            32,
            {"test": 10_000},
            "tiny-imagenet-200.zip from cs231n.stanford.edu, its folder val/images",
            within="val",
            hub=("zh-plus/tiny-imagenet", None, "image", "label", {"test": "valid"}),
        ),
        ImageSet(
            "celeba64",
            "CelebA, aligned",
            64,
            {"train": 202_599},
            "img_align_celeba.zip from mmlab.ie.cuhk.edu.hk/projects/CelebA.html, as a folder",
            crop=148,
            hub=("flwrlabs/celeba", None, "image", None, {"train": "train+valid+test"}),
        ),
    )
}


def data_folder(folder: str | Path | None = None) -> Path:
    """Where data is looked for: the folder given, else that in the variable `BILIP_DATA`, else `.data`.

    Example:
        >>> str(data_folder("somewhere"))
        'somewhere'
    """
    return Path(folder if folder is not None else os.environ.get("BILIP_DATA") or ".data")


def image_set(name: str, split: str | None = None, folder: str | Path | None = None) -> Images:
    """The images of a set by its name, from what `bilip data` prepared or from files as people have them.

    They are looked for in `folder/NAME` and in `folder`: `SPLIT.npz`, `NAME_SPLIT.npz` or, for the usual split, `NAME.npz`, with `x`
    (uint8, channels last or first) and perhaps `y`, which CIFAR-10 needs. For CIFAR-10 also the binary and the Python batches, each of
    which is held against its checksum, for SVHN the `.mat` files, and in `folder/NAME` images in folders, which are cut and averaged to
    the side of the set. A part of a set is taken as it is:
    `len` says how many there are.

    Args:
        name: `cifar10`, `svhn`, `textures`, `places`, `tiny_imagenet` or `celeba64`.
        split: `"train"` or `"test"`; by default the usual one.
        folder: By default the variable `BILIP_DATA`, else `.data`.

    Raises:
        DataNotFound: It is not there; the message says what was looked for, and how to get it.
        InputError: It is not whole, or something else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder, "svhn.npz"), x=np.zeros((2, 32, 32, 3), np.uint8), y=np.arange(2))
        ...     image_set("svhn", folder=folder).x.shape
        torch.Size([2, 3, 32, 32])
    """
    about, root = _about(name), data_folder(folder)
    split = about.split if split is None else split
    if split not in about.counts:
        raise InputError(f"{name} has no split {split!r}: expected {' or '.join(map(repr, about.counts))}.")
    found = _read(about, split, root, pictures=_places(about, split, root / name))
    if found is None:
        raise DataNotFound(
            f"no {split} images of {name} in {root / name} or {root}: looked for {', '.join(_names(about, split))}. Get "
            f"{about.how}; then run: bilip data {name} --from FOLDER. (Another place for all data: --data or BILIP_DATA.)"
        )
    return _checked(about, split, found)


def prepare_images(name: str, source: str | Path | None = None, to: str | Path | None = None) -> dict[str, Any]:
    """Read a set, verify it, and write it as `to/NAME/SPLIT.npz` with `to/NAME/set.json`, which says what it is.

    Args:
        name: Of the set.
        source: The folder that holds it; `None` fetches it through Hugging Face `datasets`, which needs a network.
        to: By default where data is looked for.

    Returns:
        What is said of the splits that were found: the number of images, that of the whole set, their shape, and whether checksums
        agree (`None` where none are known). `set.json` keeps what it says of splits that were prepared there before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder, "svhn.npz"), x=np.zeros((2, 32, 32, 3), np.uint8), y=np.arange(2))
        ...     facts = prepare_images("svhn", folder, Path(folder, "to"))
        ...     len(image_set("svhn", folder=Path(folder, "to"))), facts["splits"]["test"]["of"]
        (2, 26032)
    """
    about, root = _about(name), data_folder(to)
    if source is not None:
        _require_folder(about, Path(source))
    facts: dict[str, Any] = {"name": name, "title": about.title, "splits": {}}
    for split in about.counts:
        found = (
            _fetched(about, split)
            if source is None
            else _read(about, split, Path(source), pictures=_places(about, split, Path(source, name), Path(source)))
        )
        if found is None:
            continue
        images = _checked(about, split, found)
        folder = root / name
        _write(folder, split, images)
        facts["splits"][split] = {
            "count": len(images),
            "of": about.counts[split],
            "shape": list(images.x.shape[1:]),
            "labels": images.y is not None,
            "classes": images.classes,
            "checksums": _known(about, split, images),
            "from": found.form,
        }
    if not facts["splits"]:
        looked = [word for split in about.counts for word in _names(about, split)]
        raise InputError(f"{source} holds no images of {name}: looked for {', '.join(looked)}. Get {about.how}.")
    from bilip.record import write_json

    splits = _written_before(about, root / name) | facts["splits"]
    write_json(root / name / "set.json", facts | {"splits": splits})
    return facts


# ---- where the files are


@dataclass(frozen=True)
class _Found:
    """Images as they were read, from files of which form, and where these are."""

    images: Images
    form: str
    place: str | Path


def _about(name: str) -> ImageSet:
    if name not in IMAGE_SETS:
        raise InputError(f"there is no image set {name!r}: expected {', '.join(IMAGE_SETS)}.")
    return IMAGE_SETS[name]


def _require_folder(about: ImageSet, source: Path) -> None:
    """Raise an `InputError` unless there is such a folder."""
    if source.is_dir():
        return
    if not source.exists():
        raise InputError(
            f"--from {source} does not exist: expected the folder that holds {about.name}. Get {about.how}."
        )
    if source.suffix in (".gz", ".tgz", ".tar", ".zip", ".xz", ".bz2"):
        raise InputError(f"--from {source} is an archive: unpack it, and give the folder that it makes.")
    raise InputError(
        f"--from {source} is a file: expected the folder that holds {about.name}, so perhaps {source.parent}."
    )


def _names(about: ImageSet, split: str) -> list[str]:
    usual = [f"{about.name}.npz"] if split == about.split else []
    forms = {"cifar10": ["data_batch_1.bin, data_batch_1" if split == "train" else "test_batch.bin, test_batch"]}
    forms["svhn"] = [f"{split}_32x32.mat"]
    return [f"{split}.npz", f"{about.name}_{split}.npz", *usual, *forms.get(about.name, []), "images in folders"]


def _places(about: ImageSet, split: str, *folders: Path) -> list[Path]:
    """Where images in folders are looked for, below folders that may hold the set."""
    if len(about.counts) > 1:
        return [folder / split for folder in folders] + [folder for folder in folders if folder.name == split]
    within = [folder / about.within for folder in folders] if about.within else []
    return [*within, folders[0] / split, *folders]


def _read(about: ImageSet, split: str, root: Path, pictures: Sequence[Path]) -> _Found | None:
    """The images, and the files they came from; `None` if there are none."""
    if not root.is_dir():
        return None
    usual = [f"{about.name}.npz"] if split == about.split else []
    for place in (root / about.name, root):
        for file in (f"{split}.npz", f"{about.name}_{split}.npz", *usual):
            if (place / file).is_file():
                return _Found(load_images(place / file), file, place / file)
        if about.name == "cifar10" and (batches := cifar10_batches(place, split)):
            return _Found(_joined(about, split, batches), "the batches of CIFAR-10", place)
        if about.name == "svhn" and (place / f"{split}_32x32.mat").is_file():
            path = place / f"{split}_32x32.mat"
            return _Found(_mat(path), path.name, path)
    for place in pictures:
        if place.is_dir():
            paths = image_files(place)
            if paths:
                _require_one_part(about, place, paths)
                return _Found(_pictures(about, place, paths), "images in folders", place)
    return None


def _joined(about: ImageSet, split: str, batches: Mapping[Path, tuple[torch.Tensor, torch.Tensor]]) -> Images:
    """The images of batches of CIFAR-10, each of which holds what its name says."""
    known = dict(zip(BATCHES[split], about.md5.get(split, ()), strict=False))
    names = {md5: name for part, sums in about.md5.items() for name, md5 in zip(BATCHES[part], sums, strict=False)}
    for path, (x, y) in batches.items():
        md5, right = hashlib.md5(_records(Images(x, y)).tobytes()).hexdigest(), known.get(path.stem)
        if right is not None and md5 != right:
            what = (
                f"it holds the images of {names[md5]}"
                if md5 in names
                else f"its {len(x):,} images and labels have another checksum, so it was changed or cut"
            )
            raise InputError(f"{path} is not {path.stem} of CIFAR-10 as published: {what}. Get {about.how}.")
    x, y = (torch.cat([part[k] for part in batches.values()]) for k in (0, 1))
    return Images(x, y, CIFAR10_CLASSES)


def _require_one_part(about: ImageSet, folder: Path, paths: Sequence[Path]) -> None:
    """Raise an `InputError` if images that are said to be one part of a set lie in folders of several."""
    parts = {name for path in paths for name in path.relative_to(folder).parts[:-1]} & {"train", "test"}
    if parts:
        raise InputError(
            f"{folder} holds images in folders {' and '.join(sorted(parts))}, which are not one part of a set: expected the images of "
            f"{about.title} alone. Give the folder that holds these; get {about.how}."
        )


def _mat(path: Path) -> Images:
    """A file of SVHN: `X` of shape (32, 32, 3, count), and `y`, in which 10 stands for the digit 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        x, y = content["X"], content["y"].reshape(-1)
        if x.ndim != 4 or x.dtype != np.uint8 or len(y) != x.shape[3]:
            raise ValueError(f"X is {x.dtype} of shape {x.shape}, y has {len(y)} labels")
        if not np.isin(y, range(11)).all():
            raise ValueError(f"labels run from {y.min()} to {y.max()}")
    except Exception as error:  # a damaged file can raise almost anything
        raise InputError(
            f"{path} is not a file of SVHN ({said_by(error)}); expected X, bytes of shape (32, 32, 3, count), and y, digits with 10 for 0. "
            "It may be truncated: get it again."
        ) from error
    pixels = np.ascontiguousarray(x.transpose(3, 2, 0, 1))
    return Images(torch.from_numpy(pixels), torch.from_numpy(y.astype(np.int64) % 10), tuple("0123456789"))


def _pictures(about: ImageSet, folder: Path, paths: list[Path]) -> Images:
    """Images in folders, each cut to its centre square and averaged; folders below are the classes, where there are several."""
    out = np.empty((len(paths), 3, about.side, about.side), np.uint8)
    for k, path in enumerate(paths):
        with open_image(path) as picture:
            try:
                out[k] = _square(picture, about)
            except Exception as error:  # a broken image can raise almost anything
                raise InputError(
                    f"{path} is not a readable image ({error!s:.200}): get it again, or delete it."
                ) from error
    found = labelled(torch.from_numpy(out), folder, paths)
    return found if found.classes is None or len(found.classes) > 1 else Images(found.x)


def _square(picture: Any, about: ImageSet) -> np.ndarray:
    """The centre square of a picture, channels first."""
    width, height = picture.size
    side = min(width, height, about.crop or min(width, height))
    left, top = (width - side) // 2, (height - side) // 2
    cut = picture.convert("RGB")
    if (width, height) != (about.side, about.side):
        cut = cut.crop((left, top, left + side, top + side)).resize((about.side, about.side), pillow().Resampling.BOX)
    return np.asarray(cut).transpose(2, 0, 1)


def _fetched(about: ImageSet, split: str) -> _Found:
    """A split through Hugging Face."""
    if about.hub is None:
        raise InputError(
            f"{about.name} cannot be fetched from here. Get {about.how}; then run: bilip data {about.name} --from FOLDER."
        )
    path, config, column, labels, splits = about.hub
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra(
            f"fetching {about.name} needs Hugging Face datasets: pip install datasets. Or get {about.how}; then run: bilip data "
            f"{about.name} --from FOLDER."
        ) from error
    try:
        rows = load_dataset(path, config, split=splits[split])
        out = np.stack([_square(row[column], about) for row in rows])
        y = None if labels is None else torch.tensor([int(row[labels]) for row in rows], device="cpu")
    except Exception as error:  # a network, a server, a cache: anything may go wrong
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(
            f"{about.name} could not be fetched from Hugging Face ({text}). Get {about.how}; then run: bilip data {about.name} "
            "--from FOLDER."
        ) from error
    return _Found(Images(torch.from_numpy(out), y, about.classes), f"Hugging Face, {path}", f"Hugging Face, {path}")


# ---- is it what it should be


def _checked(about: ImageSet, split: str, found: _Found) -> Images:
    images, source = found.images, found.place
    shape, count = tuple(images.x.shape[1:]), about.counts[split]
    if shape != (3, about.side, about.side):
        raise InputError(
            f"{about.name}, {split}, from {source}: images of shape {shape}, expected {(3, about.side, about.side)}. Prepare them: bilip "
            f"data {about.name} --from FOLDER."
        )
    if not 0 < len(images) <= count:
        raise InputError(
            f"{about.name}, {split}, from {source}: {len(images)} images, expected 1 to {count}: something else. "
            f"Get {about.how}."
        )
    if images.y is None and about.md5:
        raise InputError(
            f"{about.name}, {split}, from {source}: no labels; expected an array 'y' beside 'x' in an .npz file, or images in folders of "
            f"their classes. Get {about.how}."
        )
    images = _numbered(about, images, source)
    classes = images.classes or about.classes
    if images.y is not None and classes and not 0 <= int(images.y.min()) <= int(images.y.max()) < len(classes):
        raise InputError(
            f"{about.name}, {split}, from {source}: labels {int(images.y.min())} to {int(images.y.max())}, expected 0 to "
            f"{len(classes) - 1}. Get {about.how}."
        )
    if len(images) == count and _known(about, split, images) is False:
        raise InputError(
            f"{about.name}, {split}, from {source}: as many images as the whole set, but the checksum is known, and theirs is another "
            f"one, in whatever order: a pixel or a label was changed, or a file is there twice. Get {about.how}."
        )
    return Images(images.x, images.y, classes)


def _numbered(about: ImageSet, images: Images, source: str | Path) -> Images:
    """The images with the set's own numbers of the classes: folders of some of the classes were numbered among themselves."""
    if images.y is None or images.classes is None or about.classes is None or images.classes == about.classes:
        return images
    strange = [name for name in images.classes if name not in about.classes]
    if strange:
        raise InputError(
            f"{about.name}, from {source}: {strange[0]!r} is no class of it; expected {', '.join(about.classes)}."
        )
    return Images(
        images.x,
        torch.tensor([about.classes.index(name) for name in images.classes], device="cpu")[images.y],
        about.classes,
    )


def _known(about: ImageSet, split: str, images: Images) -> bool | None:
    """Whether these are the whole split in whatever order, or every 10,000 images those of a known file, each another one; `None` where
    no checksums are known, as of a part that is no such files.
    """
    if split not in about.md5 or images.y is None or (len(images) % BATCH and len(images) != about.counts[split]):
        return None
    records = _records(images)
    sums = [hashlib.md5(records[k : k + BATCH].tobytes()).hexdigest() for k in range(0, len(records), BATCH)]
    if len(set(sums)) == len(sums) and set(sums) <= set(about.md5[split]):
        return True
    each = sorted(hashlib.md5(record.tobytes()).digest() for record in records)
    return hashlib.md5(b"".join(each)).hexdigest() == about.unordered.get(split)


def _records(images: Images) -> np.ndarray:
    """Label and pixels of each image, as in the binary files."""
    y = torch.zeros(len(images), device="cpu") if images.y is None else images.y
    return torch.cat((y[:, None].to(torch.uint8), images.x.flatten(1)), 1).numpy()


def _written_before(about: ImageSet, folder: Path) -> dict[str, Any]:
    """What `set.json` says of splits that were prepared before and are still there."""
    try:
        splits = dict(json.loads((folder / "set.json").read_text())["splits"])
    except (OSError, ValueError, LookupError, TypeError):  # not there, or damaged: it is written anew
        return {}
    return {split: splits[split] for split in about.counts if split in splits and (folder / f"{split}.npz").is_file()}


def _write(folder: Path, split: str, images: Images) -> None:
    """An .npz file, whole or not at all."""
    aside = folder / f".{split}.{os.getpid()}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if images.y is None:
            np.savez(aside, x=images.x.numpy())
        else:
            np.savez(aside, x=images.x.numpy(), y=images.y.numpy())
        os.replace(aside, folder / f"{split}.npz")
    except OSError as error:
        raise InputError(f"cannot write {folder} ({error.strerror}). Choose another --to.") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
