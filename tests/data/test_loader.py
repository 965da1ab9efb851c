"""Data as people have it: DataLoader, Dataset, .csv and .pt."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bilip
from bilip.data import as_source
from bilip.errors import InputError

X = torch.arange(60, dtype=torch.float32).reshape(20, 3)
LABELS = torch.arange(20)


class Items(Dataset):
    """Makes each sample when it is asked for."""

    def __init__(self, make, count=20):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        if not 0 <= k < self.count:
            raise IndexError
        return self.make(k)


class Stream(IterableDataset):
    def __iter__(self):
        k = 0
        while True:
            yield torch.full((3,), float(k))
            k += 1


def refused(says, read):
    """The sentence with which something is refused, on one line."""
    with pytest.raises(InputError, match=says) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(value, **options):
    return as_source("test", value, **options).read(0, as_source("test", value, **options).count)


VALUES = {
    "tensors": TensorDataset(X),
    "labelled": TensorDataset(X, LABELS),
    "items": Items(lambda k: X[k]),
    "numpy and label": Items(lambda k: (X[k].numpy(), k)),
    "list": Items(lambda k: [X[k], "a name", 3]),
    "single": Items(lambda k: (X[k],)),
    "loader": DataLoader(TensorDataset(X, LABELS), batch_size=7),
    "loader of a tensor": DataLoader(X, batch_size=7),
    "one batch": DataLoader(Items(lambda k: X[k]), batch_size=20),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_first_entry_is_x(value):
    found = rows(value)
    assert torch.equal(found.x, X)
    assert found.context is None


@pytest.mark.parametrize(
    "value", [TensorDataset(X, LABELS), Items(lambda k: (X[k], k)), DataLoader(TensorDataset(X, LABELS), 6)]
)
def test_the_second_is_the_context_of_a_conditional_model(value):
    found = rows(value, conditional=True)
    assert torch.equal(found.x, X)
    assert torch.equal(found.context, LABELS)
    assert "the second entry (int64) is the context" in as_source("t", value, conditional=True).description
    assert "the second entry (int64) is not taken" in as_source("t", value).description


def test_a_shuffled_loader_is_read_once_and_the_same_every_time():
    loader = DataLoader(TensorDataset(X), batch_size=4, shuffle=True)
    state = torch.get_rng_state()
    source = as_source("test", loader)
    assert torch.equal(source.first(20).x, source.first(20).x)
    assert torch.equal(source.first(20).x, as_source("test", loader).first(20).x)
    assert sorted(source.first(20).x[:, 0].tolist()) == X[:, 0].tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_no_more_is_read_than_asked_for():
    read = []
    spied = Items(lambda k: (read.append(k), X[k % 20])[1], count=1000)
    source = as_source("test", spied, most=10)
    assert read == list(range(0, 1000, 100))  # a dataset may be sorted: all of its length
    assert source.count == 10
    assert "10 of its 1,000 samples, evenly spaced" in source.description
    endless = as_source("test", Stream(), most=50)
    assert endless.first(50).x[:, 0].tolist() == list(range(50))
    assert as_source("test", DataLoader(Stream(), batch_size=8), most=50).count == 50


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (DataLoader(Items(lambda k: {"image": X[k], "label": k}), 4), r"yields dictionaries with the keys 'image'.*batch\['image'\]"),
        (Items(lambda k: {"x": X[k]}), "yields dictionaries with the keys 'x'"),
        (Items(lambda k: "words"), "yields str: expected a tensor x"),
        (Items(lambda k: ("words", 3)), r"yields \(str, int\)"),
        (Items(lambda k: ()), "expected a tensor x"),
        (Items(lambda k: torch.zeros(k + 1)), r"samples differ, \(1,\).*\(2,\)"),
        (Items(lambda k: 1 / 0), "raised ZeroDivisionError: division by zero"),
        (Items(lambda k: X[k], count=0), "yields nothing"),
        (DataLoader(Items(lambda k: torch.zeros(k + 1)), 4), "raised RuntimeError"),
        (Items(lambda k: 3.0), "each sample is a single number"),
        (Items(lambda k: torch.arange(3)), "the data are int64"),
    ],
)  # fmt: skip
def test_what_is_no_sample_is_said_in_one_line(value, says):
    assert refused(says, lambda: as_source("test", value)).startswith("source 'test'")


@pytest.mark.parametrize("context", [0, 1])
def test_an_audit_takes_the_context_if_the_model_does(context):
    torch.manual_seed(0)
    flow = bilip.Flow(bilip.models.real_nvp(3, blocks=2, hidden=(8,), context=context))
    loader = DataLoader(TensorDataset(torch.randn(300, 3), torch.randn(300, 1)), batch_size=64, shuffle=True)
    record = bilip.audit(flow, loader, budget="quick", probes=["consistency", "reconstruction"])
    assert record.sources[0]["count"] == 300
    assert ("is the context" if context else "is not taken") in record.sources[0]["description"]


def test_a_model_that_does_not_say_that_it_is_conditional_is_tried():
    class Hidden(torch.nn.Module):
        """Takes what it is given, and needs two."""

        def forward(self, x, *more):
            return x + more[0]

        def inverse(self, z, *more):
            return z - more[0]

    zuko = pytest.importorskip("zuko")
    torch.manual_seed(0)
    flow = zuko.flows.MAF(3, context=2, transforms=1, hidden_features=(8,))
    pairs = TensorDataset(torch.randn(300, 3), torch.randn(300, 2))
    for loader in (pairs, DataLoader(pairs, batch_size=50)):
        record = bilip.audit(flow, loader, budget="quick", probes=["reconstruction"])
        assert "is the context" in record.sources[0]["description"]
        assert record.find("reconstruction")[0]["share_wrong"] == 0
    with pytest.raises(InputError, match="without a context: it seems to be conditional"):
        bilip.audit(flow, DataLoader(TensorDataset(torch.randn(300, 3)), 50), budget="quick")
    with pytest.raises(InputError, match="takes no batch"):
        bilip.audit(Hidden(), pairs, budget="quick")


def test_a_generic_module_with_an_argument_for_it_gets_the_context():
    class Shift(torch.nn.Module):
        def forward(self, x, context):
            return x + context

        def inverse(self, z, context):
            return z - context

    loader = DataLoader(TensorDataset(torch.randn(300, 3), torch.randn(300, 1)), batch_size=64)
    record = bilip.audit(Shift(), loader, budget="quick", probes=["reconstruction"])
    assert record.find("reconstruction")[0]["share_wrong"] == 0


CSV = {
    "header": "a,b,c\n1,2,3\n4,5,6e0\n",
    "no header": "1,2,3\n4,5,6\n",
    "semicolons": "a;b;c\n1;2;3\n4;5;6\n",
    "tabs": "1\t2\t3\n4\t5\t6\n",
    "quotes and blank lines": '"a","b, too","c"\r\n\r\n"1","2"," 3"\r\n4,5,6\r\n\r\n',
    "a mark in front": "\ufeff1,2,3\n4,5,6",
}


@pytest.mark.parametrize("form", CSV)
def test_csv_files_of_numbers(tmp_path, form):
    path = tmp_path / "x.csv"
    path.write_bytes(CSV[form].encode())
    assert rows(path).x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_long_csv_file(tmp_path):
    x = np.random.default_rng(0).standard_normal((10_000, 2))
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", header="a,b", comments="", fmt="%.17g")
    assert np.array_equal(rows(tmp_path / "x.csv").x.numpy(), x)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,city\n1,Berlin\n2,Rome\n", r"column 'city' holds text \('Berlin' in line 2\)"),
        ("1,Berlin\n2,Rome\n", r"column 2 holds text \('Berlin' in line 1\)"),
        ("a,b\n1,2\n3,\n", "line 3: the cell of column 'b' is empty"),
        ("a,b\n1,2\n3\n", "line 3: 1 cells; the first line has 2"),
        ("a,b\n", "holds no numbers"),
        ("", "holds no numbers"),
        ("a,b\n1,2\n3,nan\n", "sample 1 holds NaN"),
        (b"\x89PNG\xff\xfe\x00", "not a text in UTF-8"),
    ],
)
def test_bad_csv_files_are_said_in_one_line(tmp_path, text, says):
    path = tmp_path / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(says, lambda: as_source("test", path).check())


@pytest.mark.parametrize(
    ("held", "context"),
    [
        (X, None),
        ((X, LABELS), LABELS),
        ({"x": X}, None),
        ({"data": X, "context": LABELS}, LABELS),
        ([X, LABELS], LABELS),
    ],
    ids=["tensor", "pair", "dict", "dict with a context", "list"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save(tmp_path, held, context, zipped):
    torch.save(held, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = rows(tmp_path / "x.pt")
    assert torch.equal(found.x, X)
    assert context is found.context is None or torch.equal(found.context, context)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code was run",))


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (Evil(), "holds Python objects, which could run code"),
        (TensorDataset(X), "holds Python objects"),
        ({f"layer{k}.weight": X for k in range(30)}, r"holds 'layer0.weight', .*, \.\.\.: expected an array 'x'"),
        ([X, X, X], "holds nothing: expected an array 'x'"),
        (X.to_sparse(), "is not a plain tensor"),
        (torch.tensor(3.0), "is a single number"),
        (X.long(), "the data are int64"),
    ],
)  # fmt: skip
def test_other_files_of_torch_save_are_refused_in_one_line(tmp_path, held, says):
    torch.save(held, tmp_path / "x.pt")
    refused(says, lambda: as_source("test", tmp_path / "x.pt"))


@pytest.mark.parametrize("content", [b"", b"no file of torch", b"PK\x03\x04 cut"])
def test_a_pt_file_that_is_none(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    refused("x.pt", lambda: as_source("test", tmp_path / "x.pt"))


def test_sources_with_other_features_are_said_in_one_line():
    flow = bilip.Flow(bilip.models.real_nvp(3, blocks=1, hidden=(4,)))
    two = {"test": TensorDataset(X), "far": torch.zeros(5, 4)}
    refused(r"the sources differ in shape.*\(3,\).*'far' \(4,\)", lambda: bilip.audit(flow, two, ood=["far"]))
    other = DataLoader(TensorDataset(torch.randn(20, 4)), 5)
    refused(r"takes no batch of shape \(4, 4\)", lambda: bilip.audit(flow, other, budget="quick"))
