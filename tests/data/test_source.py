import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.data import Batch, Source, as_source, noise
from bilip.data.rows import ChunkRows
from bilip.errors import InputError


def joined(source: Source, size: int, **options) -> torch.Tensor:
    return torch.cat([batch.x for batch in source.batches(size, **options)])


@given(count=st.integers(1, 40), size=st.integers(1, 50), limit=st.none() | st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_batches_cover_the_samples_in_order_on_every_pass(count, size, limit):
    x = torch.arange(2.0 * count).reshape(count, 2)
    source = as_source("test", x)
    end = count if limit is None else min(limit, count)
    for _ in range(2):
        batches = list(source.batches(size, limit=limit))
        assert torch.equal(torch.cat([b.x for b in batches]), x[:end])
        assert [b.start for b in batches] == list(range(0, end, size))
        assert all(len(b) == size for b in batches[:-1])


def test_contexts_travel_with_their_samples():
    x, context = torch.arange(10.0).reshape(5, 2), np.arange(15.0).reshape(5, 3)
    source = as_source("test", (x, context))
    assert source.context_shape == (3,)
    for batch in source.batches(2, dtype=torch.float64):
        assert batch.context is not None
        assert batch.x.dtype == batch.context.dtype == torch.float64
        assert np.array_equal(batch.context.numpy(), context[batch.start : batch.start + len(batch)])


def test_integer_contexts_stay_integers():
    source = as_source("test", (torch.zeros(3, 2), torch.tensor([4, 5, 6])))
    batch = source.first(3, dtype=torch.float64)
    assert batch.context is not None
    assert batch.context.tolist() == [4, 5, 6]
    assert not batch.context.is_floating_point()


@given(count=st.integers(1, 700), limit=st.integers(1, 700), offset=st.floats(-100, 100))
@settings(max_examples=30, deadline=None)
def test_statistics_are_those_of_the_entries(count, limit, offset):
    x = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count)) + offset
    found = as_source("test", x).statistics(limit)
    assert found.samples == min(limit, count)
    assert found.low >= float(x.min())
    assert found.high <= float(x.max())
    if limit >= count:
        assert math.isclose(found.mean, float(x.mean()), rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(found.std, float(x.std(unbiased=False)), rel_tol=1e-9)
        assert (found.low, found.high) == (float(x.min()), float(x.max()))


def test_statistics_see_the_end_of_a_sorted_source():
    x = torch.linspace(0, 1, 100_000)[:, None]
    found = as_source("test", x).statistics()
    assert found.low == 0
    assert found.high > 0.9
    assert abs(found.mean - 0.5) < 0.05


def test_check_names_the_first_bad_sample():
    x = torch.zeros(5000, 4)
    x[17, 2], x[4000, 0] = math.nan, math.inf
    with pytest.raises(InputError, match=r"source 'test': sample 17 holds NaN or Inf \(1 of 4 entries\)"):
        as_source("test", x).check()
    x[17] = 0
    with pytest.raises(InputError, match="sample 4000"):
        as_source("test", x).check()
    as_source("test", x).check(limit=4000)


def test_check_looks_at_contexts():
    context = torch.zeros(3, 2)
    context[1] = -math.inf
    with pytest.raises(InputError, match="the context of sample 1 holds NaN or Inf"):
        as_source("test", (torch.zeros(3, 2), context)).check()


def test_bytes_are_pixels():
    x = np.arange(5 * 4 * 6 * 3, dtype=np.uint8).reshape(5, 4, 6, 3)
    source = as_source("photos", x)
    assert source.shape == (3, 4, 6)
    assert source.description.endswith("uint8 scaled to [0, 1], channels moved first")
    assert np.allclose(source.first(5).x.numpy(), x.transpose(0, 3, 1, 2) / 255, atol=1e-7)
    first = as_source("photos", torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    assert first.description.endswith("uint8 scaled to [0, 1]")
    assert torch.equal(first.first(5).x, source.first(5).x)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(5, 2, device="meta"), "on the device meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]), "nested"),
        (torch.zeros(7), r"each sample is a single number.*reshape to \(count, 1\)"),
        (torch.zeros(0, 2), "nothing in them"),
        (torch.zeros(3, 0), "nothing in them"),
        (torch.zeros(()), "holds no samples"),
        (torch.zeros(3, 2, dtype=torch.int64), "the data are int64: expected floats, or uint8"),
        (torch.zeros(3, 2, dtype=torch.bool), "the data are bool"),
        (torch.zeros(3, 2, dtype=torch.complex64), "the data are complex64"),
        (np.array([["a"]]), "cannot become a tensor"),
        (np.array([[None]]), "cannot become a tensor"),
        ((torch.zeros(3, 2), torch.zeros(4, 2)), "3 samples with 4 contexts"),
        ([[1.0, 2.0]], "list holds no samples"),
        (3.0, "float holds no samples"),
        (None, "NoneType holds no samples"),
    ],
)
def test_bad_values_get_a_sentence(value, message):
    with pytest.raises(InputError, match=f"source 'test': .*{message}") as caught:
        as_source("test", value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.batches(0),
        lambda s: s.batches(2.5),
        lambda s: s.batches(2, limit=0),
        lambda s: s.batches(2, dtype=torch.int32),
        lambda s: s.first(0),
        lambda s: s.read(2, 2),
        lambda s: s.read(0, 4),
        lambda s: s.statistics(0),
    ],
)
def test_bad_arguments_raise_at_the_call(call):
    with pytest.raises(InputError, match="source 'test'"):
        call(as_source("test", torch.zeros(3, 2)))


def test_names_and_roles():
    x = torch.zeros(3, 2)
    assert as_source("test", x).role == "data"
    assert as_source("gaussian noise", x).role == "ood"
    assert as_source("Uniform", x).role == "ood"
    assert as_source("uniform", x, role="data").role == "data"
    source = as_source("test", x)
    assert as_source("other", source) is source
    for name in ("", 3):
        with pytest.raises(InputError, match="needs a name"):
            as_source(name, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected 'data' or 'ood'"):
        as_source("test", x, role="train")


def test_gradients_do_not_leak():
    source = as_source("test", torch.zeros(3, 2, requires_grad=True))
    assert not source.first(3).x.requires_grad


def test_read_only_and_foreign_byte_order():
    x = np.arange(6, dtype=">f4").reshape(3, 2)
    x.flags.writeable = False
    batch = as_source("test", x).first(3)
    assert isinstance(batch, Batch)
    assert torch.equal(batch.x, torch.arange(6.0).reshape(3, 2))


@given(start=st.integers(0, 900), length=st.integers(0, 900))
@settings(max_examples=30, deadline=None)
def test_chunks_are_functions_of_their_index(start, length):
    size = ChunkRows.CHUNK
    rows = ChunkRows(2000, (1,), torch.float32, lambda k: torch.arange(k * size, (k + 1) * size).float()[:, None])
    stop = min(start + length, 2000)
    assert torch.equal(rows.read(start, stop), torch.arange(start, stop).float()[:, None])


@pytest.mark.parametrize("kind", ["tensor", "npy", "npz", "safetensors", "folder", "pixels"])
def test_a_shuffled_source_holds_the_same_rows_in_another_order(kind, tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (40, 4, 5, 3), dtype=np.uint8)
    value, floats = x, x.astype(np.float32)
    if kind == "tensor":
        value = torch.tensor(floats)
    elif kind == "folder":
        image = pytest.importorskip("PIL.Image")
        for k, pixels in enumerate(x):
            image.fromarray(pixels).save(tmp_path / f"{k:02d}.png")
        value = tmp_path
    elif kind != "pixels":
        value = tmp_path / f"x.{kind}"
        if kind == "safetensors":
            pytest.importorskip("safetensors.numpy").save_file({"x": floats}, value)
        else:
            np.save(value, floats) if kind == "npy" else np.savez_compressed(value, x=floats)
    plain = as_source("test", value)
    mixed = plain.shuffled(3)
    order = [mixed.row(k) for k in range(40)]
    assert sorted(order) == list(range(40))
    assert order != sorted(order)
    whole = plain.read(0, 40).x
    assert mixed.read(7, 19).x.equal(whole[order[7:19]])
    assert mixed.shuffled(3).read(0, 40).x.equal(plain.shuffled(3).read(0, 40).x[order])
    assert [plain.row(k) for k in (0, 5)] == [0, 5]
    scaled = noise("scaled:2", mixed)
    assert scaled.read(3, 4).x.equal(2 * whole[scaled.row(3)][None])
