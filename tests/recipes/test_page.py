"""The page that answers whether the paper holds: every claim is there, with a status and its evidence."""

import json
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from bilip.errors import InputError
from bilip.recipes.page import STATUSES, read_claims, results_table, status, to_page, write_page
from bilip.record import read_json, write_json
from in_process import command_line

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
LABELS = Path(__file__).with_name("paper_labels.txt").read_text().split()
PROSE = [
    "silent",
    "needs",
    "error-bound",
    "additive-control",
    "modified-scaling",
    "finite-differences",
    "fd-agnostic",
    "nf-local",
    "activations",
    "grid",
    "ood-likelihood",
    "dequantization",
    "beyond-nf",
    "both-mitigate",
    "i-resnets",
    "fd-overhead",
    "fd-inverse",
    "nf-free",
    "conclusion",
    "loose",
    "residual-safe",
    "regression-setup",
    "strength",
    "every",
    "gan-at-data",
    "gan-huge-bits",
    "actnorm",
]


@pytest.fixture(scope="module")
def claims():
    return [claim for _, some in read_claims(RESULTS) for claim in some]


@pytest.fixture(scope="module")
def page():
    return to_page(RESULTS)


def test_no_claim_of_the_paper_is_missing(claims):
    """Labels of tables, figures, lemmas and the theorem, as they stand in paper.tex; two figures of the introduction have none."""
    known = {claim.label for claim in claims}
    assert len(LABELS) == 35
    assert set(LABELS) <= known
    assert {label for label in known if not label.startswith(("prose:", "intro:", "remark:"))} == set(LABELS)
    assert {"intro:celeba-reconstruction", "intro:gradient-angle"} <= known
    assert {label for label in known if label.startswith("prose:")} == {f"prose:{name}" for name in PROSE}


def test_figures_and_tables_have_the_numbers_of_the_paper(claims):
    """LaTeX counts captions in the order of the source, through the appendix."""
    number = {claim.label: claim.number for claim in claims}
    counts = {"Figure": 0, "Table": 0}
    for label in LABELS:
        if label.startswith(("fig:", "tab")):
            kind = "Figure" if label.startswith("fig:") else "Table"
            counts[kind] += 1
            assert number[label] == f"{kind} {counts[kind]}"
    assert counts == {"Figure": 19, "Table": 13}
    places = [list(number).index(label) for label in LABELS]
    assert places == sorted(places)


def test_every_claim_was_judged_by_all_results_that_are_here(claims):
    """Where this fails, results are newer than the sentence: write its status and why anew, then name the size in its sizes."""
    for claim in claims:
        if claim.recipe:
            assert set(claim.sizes) == set(read_json(RESULTS / claim.recipe / "ours.json")["runs"]), claim.label


def test_each_claim_has_a_status_a_reason_and_evidence_that_exists(claims):
    learned = read_json(RESULTS / "claims.json")["learned"]
    assert len(learned) >= 6
    for claim in claims:
        assert claim.status in STATUSES
        assert claim.says
        assert claim.why.endswith(".")
        assert claim.evidence or claim.status == "not run", claim.label
    paths = {path for claim in claims for path in claim.evidence} | {
        path for item in learned for path in item["evidence"]
    }
    for path in paths:
        file, _, name = path.partition("::")
        assert (ROOT / file).is_file(), path
        assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), path


def test_nothing_counts_as_seen_without_results(claims):
    """A status that speaks of runs needs runs, with lines and figures of the names that are asked for."""
    for claim in claims:
        ours = RESULTS / claim.recipe / "ours.json"
        if not claim.recipe or not ours.exists():
            assert claim.status == "not run" or not claim.recipe, claim.label
            continue
        runs = read_json(ours)["runs"].values()
        lines = [line["what"] for run in runs for line in run["lines"]]
        figures = [name for run in runs for name in run["figures"]]
        if claim.status == "not run":
            continue
        if claim.lines:
            assert any(fnmatchcase(what, f"{start}*") for what in lines for start in claim.lines), claim.label
        for wanted in claim.figures:
            sized = [f"{wanted}-{size}.png" for size in ("quick", "gpu", "paper")]
            assert any(fnmatchcase(name, one) for name in figures for one in sized), (claim.label, wanted)


def test_tables_of_hyperparameters_say_what_was_used(claims):
    tables = [claim for claim in claims if claim.kind == "hyperparameters" and claim.status != "not run"]
    assert len(tables) >= 5
    assert all(len(row) == 3 for claim in tables for row in claim.settings)
    assert all(claim.settings for claim in tables)


def test_the_page_holds_everything_and_asks_for_nothing(page, claims):
    assert len(page.encode()) < 8e6
    for claim in claims:
        assert f'id="{claim.id}"' in page
    assert page.count('class="badge"') == len(claims)
    assert "bilip reproduce coupling_depth --size paper --seeds 0" in page
    assert "NVIDIA H200" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert page.count("data:image/png;base64,") == len(set(re.findall(r"data:image/png;base64,([^\"]+)", page))) > 10


@pytest.fixture
def small(tmp_path):
    """Claims with the results of one recipe."""
    shutil.copy(RESULTS / "claims.json", tmp_path / "claims.json")
    shutil.copytree(RESULTS / "coupling_depth", tmp_path / "coupling_depth")
    return tmp_path


def test_results_that_come_later_are_on_the_page(small):
    document = read_json(small / "claims.json")
    waiting = [c for s in document["sections"] for c in s["claims"] if c.get("recipe") == "celeba_samples"]
    for claim in waiting:
        claim |= {"status": "not run", "evidence": [], "sizes": []}
    write_json(small / "claims.json", document)
    before = to_page(small)
    assert "not been judged by them yet" not in before
    run = read_json(RESULTS / "coupling_depth" / "ours.json")["runs"]["quick"] | {"figures": ["samples-affine-gpu.png"]}
    run["lines"] = [{"what": "samples lost", "paper": "some", "ours": "12 <of> 32", "holds": True}]
    (small / "celeba_samples").mkdir()
    shutil.copy(RESULTS / "coupling_depth" / "depth-quick.png", small / "celeba_samples" / "samples-affine-gpu.png")
    write_json(small / "celeba_samples" / "ours.json", {"recipe": "celeba_samples", "schema": 1, "runs": {"gpu": run}})
    after = to_page(small)
    assert "12 &lt;of&gt; 32" in after
    assert "at the size gpu are here by now; the claim has not been judged by them yet" in after
    assert after.count("data:image/png") == before.count("data:image/png") + 1


def test_commands_of_parts_that_were_collected_measure_them(page):
    assert "bilip reproduce gradient_angles --size gpu --seeds 0 --parts " in page
    assert "--collect" not in page


def test_seeds_with_other_parts_have_a_command_of_their_own(page):
    """A second seed of some runs is not a second seed of all."""
    parts = read_json(RESULTS / "cifar10_classifier" / "ours.json")["runs"]["gpu"]["parts"]
    assert 0 < len(parts["1"]) < len(parts["0"])
    for seed, some in parts.items():
        assert f"bilip reproduce cifar10_classifier --size gpu --seeds {seed} --parts {','.join(some)}<" in page
    assert "cifar10_classifier --size gpu --seeds 0,1" not in page


def test_a_status_without_the_results_behind_it_is_marked(small, page):
    assert "are not in this folder" not in page
    assert "The results of <code>ood</code> that this was judged by are not in this folder." in to_page(small)


def test_figures_are_taken_by_their_whole_name(page):
    """Those of shuffles are not shown for convolutions."""
    section = page.partition('id="fig-cls-additive-conv"')[2].partition("</section>")[0]
    assert "additive-gpu, size gpu" in section
    assert "shuffle-gpu" not in section.replace("--parts", "")


# ---- bad input


def test_without_claims(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"holds no claims.json.*--results FOLDER"):
            to_page(folder)


def test_claims_without_results(tmp_path):
    shutil.copy(RESULTS / "claims.json", tmp_path / "claims.json")
    with pytest.raises(InputError, match=r"claims but no results.*bilip reproduce coupling_depth --out"):
        to_page(tmp_path)
    (tmp_path / "coupling_depth").mkdir()
    write_json(tmp_path / "coupling_depth" / "ours.json", {"recipe": "coupling_depth", "schema": 1, "runs": {}})
    with pytest.raises(InputError, match="claims but no results"):
        to_page(tmp_path)


def test_results_of_mixed_schemas(small):
    (small / "checkerboard").mkdir()
    write_json(small / "checkerboard" / "ours.json", {"recipe": "checkerboard", "schema": 2, "runs": {}})
    with pytest.raises(
        InputError, match=r"checkerboard/ours.json has schema 2, the others 1.*[Rr]un that recipe again"
    ):
        to_page(small)


LINE = {"what": "a", "paper": "", "ours": "", "holds": None}


def one_run(**changes):
    return json.dumps({"recipe": "x", "schema": 1, "runs": {"gpu": {"lines": [LINE]} | changes}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "schema None"),
        ('{"recipe": "x", "schema": 1, "runs": {"gpu": {}}}', "no lines"),
        ('{"recipe": "x", "schema": 1, "runs": []}', "damaged"),
        ('{"recipe": "x", "schema": 1, "runs": null}', "damaged"),
        (one_run(lines=["a"]), "damaged"),
        (one_run(lines=[{"what": "a"}]), "damaged"),
        (one_run(environment=None), "damaged"),
        (one_run(figures=None), "damaged"),
        (one_run(parts=[]), "damaged"),
        (one_run(parts={"0": 3}, command="x --collect"), "damaged"),
        (one_run(figures=[3]), "damaged"),
        (one_run(other_than_paper=[3]), "damaged"),
        (one_run(device=3), "damaged"),
        *((one_run(lines=[LINE | change]), "damaged") for change in ({"what": None}, {"ours": 3}, {"holds": "yes"})),
    ],
)
def test_results_that_are_damaged(small, text, said):
    (small / "coupling_depth" / "ours.json").write_text(text)
    with pytest.raises(InputError, match=said):
        to_page(small)
    assert status("coupling_depth", "gpu", small) == "not run"
    assert "coupling_depth" not in results_table(small)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 9}, "reads schema 1"),
        ({"learned": 3}, "what was learned"),
        ({"learned": [{"evidence": None}]}, "what was learned"),
        ({"sections": []}, "no sections"),
        ({"sections": {"1": []}}, "a list of sections"),
        ({"sections": ["1"]}, "a list of sections"),
        ({"sections": [{"title": "1"}]}, "a list of claims"),
        ({"sections": [{"title": "1", "claims": ["fig:a"]}]}, "found 'fig:a'"),
        ({"sections": [{"title": "1", "claims": [{"label": "fig:a"}]}]}, "'fig:a' has no 'kind'"),
    ],
)
def test_claims_that_are_not_whole(small, change, said):
    document = read_json(small / "claims.json") | change
    write_json(small / "claims.json", document)
    with pytest.raises(InputError, match=said):
        to_page(small)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "maybe"}, "status 'maybe'"),
        ({"status": ["reproduced"]}, "expected a text"),
        ({"label": "prose:silent"}, "there twice"),
        ({"more": "1"}, "more"),
        ({"recipe": 3}, "'recipe' of the entry"),
        ({"figures": "samples"}, "expected a list"),
        ({"settings": [["Batch size", "64"]]}, "its name, the paper's and ours"),
    ],
)
def test_an_entry_that_is_wrong_is_named(small, change, said):
    document = json.loads((small / "claims.json").read_text())
    document["sections"][0]["claims"][0].update(change)
    write_json(small / "claims.json", document)
    with pytest.raises(InputError, match=said):
        to_page(small)


def test_a_figure_that_is_none_is_named(small):
    (small / "coupling_depth" / "depth-paper.png").write_text("no image")
    with pytest.raises(InputError, match=r"depth-paper.png is not a PNG"):
        to_page(small)


def test_from_the_command_line(small, tmp_path, monkeypatch, capfd):
    run = command_line(monkeypatch, capfd)
    write_page(tmp_path / "one.html", small)
    code, out, _ = run("reproduce", "--page", "--results", str(small), "--out", str(tmp_path / "two.html"))
    assert (code, "two.html" in out) == (0, True)
    assert (tmp_path / "two.html").read_text() == (tmp_path / "one.html").read_text()
    code, _, said = run("reproduce", "ood", "--page", "--results", str(small))
    assert (code, "run it without 'ood'" in said) == (2, True)
    code, _, said = run("reproduce", "--page", "--results", str(tmp_path / "none"))
    assert (code, "claims.json" in said) == (2, True)
