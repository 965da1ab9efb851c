import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilip.blocks import AdditiveCoupling, Checkerboard, Indices, Split, Streams
from bilip.errors import PartitionError
from bilip.nets import MLP


@given(total=st.integers(2, 9), data=st.data())
def test_indices_merge_what_they_split(total, data):
    order = data.draw(st.permutations(range(total)))
    cut = data.draw(st.integers(1, total - 1))
    partition = Indices(order[:cut], order[cut:], total=total, dim=-1)
    x = torch.randn(2, 3, total)
    first, second = partition.split(x)
    assert torch.equal(first, x[..., order[:cut]])
    assert torch.equal(partition.merge(first, second), x)


@given(height=st.integers(1, 5), width=st.integers(2, 5), swap=st.booleans())
def test_checkerboards_cover_every_pixel_once(height, width, swap):
    x = torch.rand(2, 3, height, width) + 1
    partition = Checkerboard(swap=swap)
    seen, moved = partition.split(x)
    assert torch.equal(partition.merge(seen, moved), x)
    assert int((seen != 0).sum()) + moved.numel() == x.numel()
    other, _ = Checkerboard(swap=not swap).split(x)
    assert torch.equal(seen + other, x)


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("swap", [False, True])
def test_splits_along_any_dimension(dim, swap):
    x = torch.randn(2, 5, 4, 3)
    partition = Split(dim=dim, swap=swap)
    assert torch.equal(partition.merge(*partition.split(x)), x)


def test_streams():
    x = torch.randn(4, 2, 3, 8, 8)
    first, second = Streams(swap=True).split(x)
    assert torch.equal(first, x[:, 1])
    assert torch.equal(Streams(swap=True).merge(first, second), x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Indices([], total=3), "a part is empty"),
        (lambda: Indices([0, 1, 2], total=3), "a part is empty"),
        (lambda: Indices([0, 1], [1, 2], total=3), r"overlap or repeat at \[1\]"),
        (lambda: Indices([0], [2], total=3), r"missing \[1\]"),
        (lambda: Indices([0], [1, 5], total=2), r"out of range \[5\]"),
        (lambda: Split(dim=0), "dim=0 is the batch"),
        (lambda: Split(size=0), "at least one entry"),
        (lambda: Split().split(torch.ones(2, 1)), r"shape \(2, 1\) cannot be divided"),
        (lambda: Split(size=4).split(torch.ones(2, 3)), "cannot be divided"),
        (lambda: Split(dim=3).split(torch.ones(2, 3)), "cannot be divided"),
        (lambda: Indices([0], total=2).split(torch.ones(2, 3)), "does not have 2 entries"),
        (lambda: Checkerboard().split(torch.ones(2, 3)), "expected images"),
        (lambda: Streams().split(torch.ones(2, 3, 4)), "two streams"),
    ],
)
def test_bad_partitions(make, says):
    with pytest.raises(PartitionError, match=says):
        make()


@pytest.mark.parametrize("change", ["first", "second", "order"])
def test_nothing_is_proved_with_indices_that_were_overwritten(change):
    """As by `to_empty()`, which leaves buffers that no checkpoint holds."""
    block = AdditiveCoupling(MLP(2, 2), Indices([0, 3], total=4))
    assert block.bounds().forward > 1
    getattr(block.partition, change).zero_()
    with pytest.raises(PartitionError, match="no longer hold each of"):
        block.bounds()
