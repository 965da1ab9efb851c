import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from bilip.data import as_source
from bilip.errors import InputError, MissingExtra

X = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
C = np.arange(100, dtype=np.float32).reshape(50, 2)


def saved(path, compressed=False, **arrays):
    """A file of the kind that its name says; an .npy file has the first of the arrays."""
    if path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif path.suffix == ".npz":
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
    else:
        save_file({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}, path)
    return path


def write(path, form):
    kind = "npy" if form == "fortran" else form.split()[0]
    x = np.asfortranarray(X) if "fortran" in form else X.astype(">f4") if "big-endian" in form else X
    more = {"y": np.arange(50)} if kind == "npz" else {}
    return saved(path / f"x.{kind}", "compressed" in form, x=x, context=C, **more)


FORMS = ["npy", "fortran", "npz", "npz compressed", "npz fortran", "npz big-endian", "safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_files_give_what_was_written(tmp_path, form):
    path = write(tmp_path, form)
    source = as_source("test", str(path))
    assert (source.count, source.shape, source.description) == (50, (3,), path.name)
    for size in (7, 50):  # the second pass goes back to the beginning
        assert np.array_equal(torch.cat([b.x for b in source.batches(size)]).numpy(), X)
    if "npz" in form or form == "safetensors":
        context = source.read(30, 40).context
        assert context is not None
        assert np.array_equal(context.numpy(), C[30:40])


@pytest.mark.parametrize("form", ["npz", "pictures"])
def test_a_file_is_found_after_the_working_folder_has_changed(tmp_path, monkeypatch, form):
    path = write(tmp_path, "npz") if form == "npz" else tmp_path / form
    photo(tmp_path / "pictures" / "0.png")
    monkeypatch.chdir(tmp_path)
    source = as_source("test", path.name)
    monkeypatch.chdir("/")
    assert len(source.read(0, 1)) == 1


@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "safetensors"])
def test_a_file_that_is_changed_while_it_is_read(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    torch.save(torch.from_numpy(X), path) if kind == "pt" else saved(path, x=X)
    source, shuffled = as_source("test", path), as_source("test", path).shuffled()
    first = source.read(0, 5).x
    whole = path.read_bytes()
    with path.open("r+b") as file:  # in place
        file.seek(len(whole) // 4)
        file.write(b"\xff" * (len(whole) // 2))
    os.utime(path, ns=(0, 0))  # clocks of file systems are slow
    for each in (source, shuffled):
        with pytest.raises(InputError, match=f"x.{kind} was changed while it was read: wait"):
            each.read(5, 10)
    os.truncate(path, 100)
    with pytest.raises(InputError, match="was changed while it was read"):
        source.read(5, 10)
    assert np.array_equal(first.numpy(), X[:5])  # what was read before is a copy


@pytest.mark.parametrize("kind", ["npy", "pt", "safetensors"])
def test_a_file_that_is_replaced_is_read_to_its_end(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    torch.save(torch.from_numpy(X), path) if kind == "pt" else saved(path, x=X)
    source = as_source("test", path)
    (tmp_path / "other").write_bytes(b"something else")
    (tmp_path / "other").replace(path)
    assert np.array_equal(source.read(40, 50).x.numpy(), X[40:])


def test_two_passes_at_once(tmp_path):
    source = as_source("test", write(tmp_path, "npz compressed"))
    for a, b in zip(source.batches(8), source.batches(8), strict=True):
        assert torch.equal(a.x, b.x)


def test_an_npz_source_can_be_copied_to_a_worker(tmp_path):
    source = as_source("test", write(tmp_path, "npz"))
    first = source.first(3).x
    assert torch.equal(pickle.loads(pickle.dumps(source)).first(3).x, first)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_is_never_unpacked_as_a_whole(tmp_path, save):
    save(tmp_path / "x.npz", np.zeros((200_000, 32), np.float32))  # 26 MB
    source = as_source("test", tmp_path / "x.npz")
    tracemalloc.start()
    total = sum(len(batch) for batch in source.batches(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 200_000
    assert peak < 4e6


@pytest.mark.parametrize(("names", "good"), [(["data"], True), (["data", "context"], True), (["a", "b"], False)])
@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_keys(tmp_path, names, good, form):
    path = saved(tmp_path / f"f.{form}", **dict.fromkeys(names, X))
    if good:
        assert as_source("test", path).count == 50
    else:
        with pytest.raises(InputError, match="holds 'a', 'b': expected an array 'x'"):
            as_source("test", path)


def one_line(path, message):
    with pytest.raises(InputError, match=message) as caught:
        as_source("test", path).check()
    text = str(caught.value)
    assert text.startswith(("source 'test': ", str(path)))
    assert "\n" not in text


def test_missing_and_unknown_files(tmp_path):
    one_line(tmp_path / "none.npy", "does not exist")
    (tmp_path / "x.parquet").write_bytes(b"")
    one_line(tmp_path / "x.parquet", "not of a kind that is read here: expected .npy")
    one_line("uniform:4", "is a kind of noise, not a file")
    one_line("x" * 5000 + ".npy", "cannot be read: .*too long|does not exist")
    one_line("a\0b.npy", "does not exist|cannot be read")


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 30, b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x93NUMPY\x09\x00" + b" " * 99]
)
def test_foreign_files(tmp_path, suffix, content):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    one_line(path, "cannot be read|holds nothing")


@given(cut=st.integers(0, 900), form=st.sampled_from(["npy", "npz", "npz compressed", "safetensors"]))
@settings(max_examples=60, deadline=None)
def test_truncated_files(tmp_path_factory, cut, form):
    path = write(tmp_path_factory.mktemp("cut"), form)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    one_line(path, "cannot be read|truncated|holds nothing")


def test_packed_in_a_way_that_is_not_known(tmp_path):
    path = write(tmp_path, "npz")
    content = bytearray(path.read_bytes())
    entry = content.find(b"PK\x01\x02")  # of the first member, in the table at the end
    content[8:10] = content[entry + 10 : entry + 12] = (97).to_bytes(2, "little")
    path.write_bytes(content)
    one_line(path, "compression method is not supported. Save it again with numpy")


def test_damaged_members(tmp_path):
    path = write(tmp_path, "npz compressed")
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("x.npy").header_offset + 60
    raw[start : start + 200] = bytes(200)
    path.write_bytes(bytes(raw))
    with pytest.raises(InputError, match="x.npz"):
        as_source("test", path).check()


def test_pickled_arrays_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[None]]), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([[None]]))
    for name in ("x.npy", "x.npz"):
        one_line(tmp_path / name, "Python objects, which could run code")


def with_header(raw, old, new):
    """An .npy file whose header says something else about the same bytes."""
    length = int.from_bytes(raw[8:10], "little")
    text = raw[10 : 10 + length].decode("latin1").rstrip().replace(old, new) + "\n"
    return raw[:8] + len(text).to_bytes(2, "little") + text.encode("latin1") + raw[10 + length :]


LIES = [
    ("(50, 3)", "(True, 2)", "the shape is"),
    ("(50, 3)", "(50, 3, 10000000000)", "at most 1,073,741,824 bytes"),
    ("(50, 3)", "(51, 3)", "has 612 bytes, the file has 600"),
    ("(50, 3)", "(-50, -3)", "the shape is"),
    ("(50, 3)", f"({2**70}, 3)", "the shape is"),
    ("(50, 3)", "[50, 3]", "cannot be read"),
    ("(50, 3)", "(50, 3.0)", "cannot be read"),
    ("(50, 3)", "(" * 3000, "cannot be read"),
    ("False", "1", "cannot be read"),
    ("<f4", "<f16", "cannot become a tensor"),
    ("<f4", "<M8[s]", "cannot become a tensor"),
    ("<f4", "|V4", "cannot become a tensor"),
    ("<f4", "(3,)<f4", "cannot"),
]


@pytest.mark.parametrize(("old", "new", "says"), LIES, ids=[f"{old} as {new}"[:30] for old, new, _ in LIES])
@pytest.mark.parametrize("form", ["npy", "fortran", "npz", "npz fortran"])
def test_headers_that_lie(tmp_path, form, old, new, says):
    path = write(tmp_path, form)
    new = {"True": "0"}.get(new, new) if "fortran" not in form or old != "False" else "2"
    old = "True" if "fortran" in form and old == "False" else old
    if path.suffix == ".npy":
        path.write_bytes(with_header(path.read_bytes(), old, new))
    else:
        with zipfile.ZipFile(path) as archive:
            raw = with_header(archive.read("x.npy"), old, new)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", raw)
    one_line(path, says)


def test_a_shape_by_columns_that_is_longer_than_the_file(tmp_path):
    path = write(tmp_path, "fortran")
    path.write_bytes(with_header(path.read_bytes(), "(50, 3)", "(7, 3000)"))
    one_line(path, "has 84,000 bytes, the file has 600 for it")


@pytest.mark.parametrize("name", ["x", "context"])
def test_a_tensor_that_repeats_a_few_numbers_for_ever(tmp_path, name):
    few, path = torch.randn(1, 4).expand(10**12, 4), tmp_path / "x.pt"
    torch.save({"x": torch.zeros(3, 4), "context": torch.zeros(3, 1)} | {name: few}, path)
    with pytest.raises(InputError, match=f"tensor '{name}'.* holds 4 numbers, which are repeated by expand"):
        as_source("test", path)
    torch.save(torch.zeros(8, 4).T[:, ::2], path)  # views hold what their shape says
    assert as_source("test", path).count == 4


def test_an_encrypted_archive(tmp_path):
    path = write(tmp_path, "npz")
    raw = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.find(mark) + place] |= 1
    path.write_bytes(raw)
    one_line(path, "encrypted, password required.*Save it again with numpy")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64], ids=str)
def test_dtypes_that_no_model_takes(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.from_numpy(X).to(dtype)}, path)
    one_line(path, "tensor 'x', holds .*: expected BF16, BOOL, F16, F32, F64|the data are")
    with pytest.raises(InputError, match="expected floats"):
        as_source("test", torch.from_numpy(X).to(dtype))


def test_four_bits_a_number(tmp_path):
    text = b'{"x":{"dtype":"F4","shape":[4,4],"data_offsets":[0,8]}}'
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    one_line(tmp_path / "x.safetensors", "tensor 'x', holds F4: expected")


def test_a_picture_that_is_a_program(tmp_path):
    """Pillow would hand PostScript to an interpreter, whatever the file is called."""
    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 moveto\n%%EOF\n"
    )
    one_line(tmp_path, "a.png is not a readable image")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png", "BMP")
    one_line(tmp_path, "a.png is not a readable image")


def test_a_picture_that_would_fill_the_memory(tmp_path):
    Image.new("1", (12_000, 12_000)).save(tmp_path / "a.png")
    one_line(tmp_path, "a.png is not a readable image .*exceeds limit")


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
@pytest.mark.parametrize(("shape", "message"), [((0, 3), "nothing in them"), ((5,), "single number"), ((), "")])
def test_odd_shapes(tmp_path, name, shape, message):
    one_line(saved(tmp_path / name, x=np.zeros(shape)), message)


def photo(path, size=(4, 6), mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def test_folder_of_images(tmp_path):
    pixels = [photo(tmp_path / name, seed=k) for k, name in enumerate(["a.png", "b.PNG", "cat/c.png"])]
    photo(tmp_path / "d.jpg")
    (tmp_path / "notes.txt").write_text("not an image")
    source = as_source("photos", tmp_path)
    assert (source.count, source.shape, source.dtype) == (4, (3, 6, 4), torch.float32)
    assert "uint8 scaled to [0, 1]" in source.description
    assert np.allclose(source.first(3).x.numpy(), np.stack(pixels).transpose(0, 3, 1, 2) / 255, atol=1e-7)


def test_grey_images(tmp_path):
    pixels = photo(tmp_path / "a.png", mode="L")
    source = as_source("photos", tmp_path)
    assert source.shape == (1, 6, 4)
    assert np.allclose(source.first(1).x[0, 0].numpy(), pixels / 255, atol=1e-7)
    photo(tmp_path / "b.png", mode="RGB")
    assert as_source("photos", tmp_path).shape == (3, 6, 4)


def test_folders_behind_links_are_read_too_and_none_twice(tmp_path):
    """As where a part of a set is chosen by links to its classes."""
    for name in ("cat", "dog"):
        photo(tmp_path / "all" / name / "0.png")
    chosen = tmp_path / "chosen"
    photo(chosen / "ant" / "0.png")
    (chosen / "dog").symlink_to(tmp_path / "all" / "dog")
    (chosen / "dog" / "loop").symlink_to(chosen)
    assert as_source("photos", chosen).count == 2


def test_bad_folders(tmp_path):
    one_line(tmp_path, "holds no PNG or JPEG image")
    photo(tmp_path / "a.png")
    photo(tmp_path / "b.png", size=(5, 6))
    one_line(tmp_path, r"a.png is 4 x 6, .*b.png is 5 x 6")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    one_line(tmp_path, "b.png (cannot be decoded|is not a readable image)")
    (tmp_path / "b.png").write_bytes(b"nonsense")
    one_line(tmp_path, "b.png is not a readable image")
    Image.fromarray(np.zeros((6, 4), np.uint16)).save(tmp_path / "b.png")
    one_line(tmp_path, "8 bits a channel")


@pytest.mark.parametrize(("module", "extra"), [("PIL", "images"), ("safetensors", "train")])
def test_missing_extras_are_named(tmp_path, monkeypatch, module, extra):
    path = tmp_path if module == "PIL" else write(tmp_path, "safetensors")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"bilip\[{extra}\]"):
        as_source("test", path)


@pytest.mark.process
def test_import_needs_torch_and_numpy_only():
    code = "import sys, bilip.data; assert not {'PIL', 'safetensors', 'bilip.nets', 'bilip.blocks'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
