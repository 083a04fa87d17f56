"""The benchmark of shuffles: what it says of an order is right, and docs/plans.md says what it found."""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def quality(import_benchmark):
    return import_benchmark("shuffle_quality")


def drifting(num_windows):
    """Values of which neighbours are alike, as windows of a document are."""
    noise = np.random.default_rng(0).normal(size=(2, num_windows))
    walk = np.convolve(np.concatenate([noise[0], noise[0][:31]]), np.ones(32), "valid")
    return walk / 32**0.5 + noise[1]


@pytest.mark.parametrize("block_windows", [2, 5, 40])
def test_the_intraclass_correlation_is_the_mean_over_the_pairs_of_all_blocks(quality, block_windows):
    values = drifting(200)
    deviations = values - values.mean()
    places = np.arange(200)[:, None] + np.arange(block_windows)
    blocks = deviations[places % 200]
    pairs = blocks.sum(axis=1) ** 2 - (blocks**2).sum(axis=1)
    expected = pairs.mean() / (block_windows * (block_windows - 1)) / values.var()
    assert quality.intraclass_correlation(values, block_windows) == pytest.approx(expected)


def test_the_variance_of_means_is_what_the_theory_says_of_each_order(quality):
    values = drifting(8000)
    result = quality.measure_quality({"drift": values}, np.arange(8000) // 16, 8, seq_len=4, num_epochs=100)
    rows = result["variance_over_full_shuffle"]
    assert {row["steps"] for row in rows} == {1, 10, 100}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["predicted"], rel=0.1, abs=4 * row["standard_error"]), row
    ratios = {(row["order"], row["steps"]): row["ratio"] for row in rows}
    assert ratios["ShuffledBlocks, default", 1] < 1.1 < 1.4 < ratios["ShuffledBlocks, few open", 1]
    assert ratios["ShuffledBlocks, default", 100] < ratios["ShuffledBlocks, few open", 100] / 2
    assert ratios["ShuffledBlocks, few open", 100] < ratios["SequentialWindows", 100] * 1.1
    in_order, shuffled = result["intraclass_correlation"], result["with_documents_shuffled"]
    assert shuffled["drift"][256] < 0.9 * in_order["drift"][256]


def test_shuffled_documents_stay_whole_and_in_order_inside(quality):
    documents = np.repeat(np.arange(20), 3)
    shuffled = quality.shuffle_documents(np.arange(60.0), documents).reshape(20, 3)
    assert (np.diff(shuffled) == 1).all()
    firsts = shuffled[:, 0].tolist()
    assert sorted(firsts) == list(range(0, 60, 3)) != firsts


def test_features_are_of_the_bytes_of_each_window(quality):
    rows = [b"# a b c ", b"d # e f\n", b"gh\nij\nkl", b"m # n\n o"]
    windows = np.array([list(row) for row in rows])
    comments, space, line, component = quality.text_features(windows).values()
    assert (8 * comments).tolist() == [8, 7, 0, 3]  # a comment goes on in the next window
    assert (8 * space).tolist() == [4, 4, 2, 4]
    assert (8 / line).tolist() == pytest.approx([1, 2, 3, 2])
    counts = [(windows == byte).sum(axis=1).var() for byte in range(256)]
    assert max(counts) < component.var() < sum(counts)


class CountingTrainer:
    """Makes the number of the run its parameters, and its loss."""

    batch_size, seq_len, num_steps = 2, 16, 10

    def __init__(self):
        self.plans = []

    def train(self, tokens, plan, seed):
        assert len(tokens) == (2 * 10 + 1) * 16
        self.plans.append((type(plan).__name__, seed))
        return len(self.plans)

    def mean_loss(self, params, tokens):
        return params


def test_training_goes_on_after_the_runs_that_are_finished(import_benchmark, tmp_path):
    shuffle_training = import_benchmark("shuffle_training")
    text = np.arange(1, 1001, dtype=np.uint16)
    corpus = shuffle_training.Corpus(train=text, validation=text, end_of_text=1000)
    finished, trainer = tmp_path / "runs.jsonl", CountingTrainer()
    rows = shuffle_training.train_orders(corpus, trainer, 2, finished)
    assert [row["validation_losses"] for row in rows] == [[i, i + 6] for i in range(1, 7)]
    kinds = ["ShuffledEpochs", *["ShuffledBlocks"] * 4, "SequentialWindows"]
    assert trainer.plans == [(kind, seed) for seed in range(2) for kind in kinds]

    lines = finished.read_text().splitlines(keepends=True)
    finished.write_text("".join(lines[:9]))
    trainer = CountingTrainer()
    after = shuffle_training.train_orders(corpus, trainer, 2, finished)
    assert trainer.plans == [("ShuffledBlocks", 1)] * 2 + [("SequentialWindows", 1)]
    assert [row["validation_losses"] for row in after] == [[1, 7], [2, 8], [3, 9], [4, 1], [5, 2], [6, 3]]


def test_an_epoch_of_training_has_a_piece_of_each_document_in_order(import_benchmark):
    Corpus = import_benchmark("shuffle_training").Corpus
    documents = [np.append(np.arange(100 * k, 100 * k + size), 999) for k, size in enumerate((40, 8, 80))]
    corpus = Corpus(train=np.concatenate(documents), validation=documents[0], end_of_text=999)
    tokens = corpus.one_epoch(num_windows=7, seq_len=4)
    assert tokens.size == (7 + 1) * 4
    ends = np.flatnonzero(tokens == 999)
    pieces = np.split(tokens, ends + 1)
    assert [set(piece[piece < 999] // 100) for piece in pieces] == [{0}, {1}, {2}]
    assert [piece.size for piece in pieces] == [11, 3, 18]  # a quarter of 41, 9 and 81, cut to 32
    for piece in pieces:
        assert (np.diff(piece[piece < 999]) == 1).all()
    with pytest.raises(SystemExit, match=r"33 windows; the corpus has 31: choose fewer --steps"):
        corpus.one_epoch(num_windows=33, seq_len=4)


def test_the_plans_page_has_the_tables_of_the_committed_result(import_benchmark):
    shuffle_report = import_benchmark("shuffle_report")
    result = json.loads((ROOT / "benchmarks/results/shuffle.json").read_text())
    page, sections = (ROOT / "docs/plans.md").read_text(), shuffle_report.sections(result)
    for name, table in sections.items():
        assert f"results -->\n{table}\n<!-- /{name} -->" in page, "python -m benchmarks report"
    for row in result["training"]["orders"]:
        losses = row["validation_losses"]
        assert f"{np.mean(losses):.3f} ± {np.std(losses, ddof=1):.3f}" in sections["shuffle-losses"]
