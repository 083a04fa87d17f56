"""docs/compatibility.md, held by golden values: numbers and names that a new release may not change.

A failure here means that runs saved with the last release would go on with other samples, or that a
program which reads our JSON would break. Mend the code, not the golden value; a change that is meant
needs a new plan, or a new major version.
"""

import json
import sys

import numpy as np
import pytest

import tokenloader as tl
from tokenloader.check.fingerprint import full_fingerprint
from tokenloader.cli.commands import main

NUM_TOKENS, SEQ_LEN = 10_248_871_837, 1024
# The first samples, one within the first epoch, its last, the next epoch's first, and one far on.
SAMPLES = (0, 1, 2, 1000, 10_008_661, 10_008_662, 10**12)


def window_starts(plan, samples, num_tokens=NUM_TOKENS, seq_len=SEQ_LEN):
    """Starts of the samples' windows: the one place here that knows how a plan is asked."""
    return plan.bind(num_tokens, seq_len).window_starts(samples).tolist()


PLANS = [
    (
        tl.RandomWindows(seed=0),
        "528050379 256629850 5723642679 2147690403 7366597891 8009684485 5187183683",
    ),
    (
        tl.RandomWindows(seed=2**64 - 1),
        "395535242 5687435574 5675871373 1844185400 6340459233 1274303254 9869381771",
    ),
    (
        tl.ShuffledEpochs(seed=0),
        "5243908900 7879671588 6768962340 1850777380 6137188132 1428548883 8371142647",
    ),
    (
        tl.ShuffledEpochs(seed=2**64 - 1),
        "5158899895 6266503351 3855583415 1577536695 4276633783 675880346 7163160624",
    ),
    (
        tl.ShuffledBlocks(seed=0),
        "9325243018 7245274762 5501592202 2491051658 7749508746 3616937653 4605639020",
    ),
    (
        tl.ShuffledBlocks(seed=2**64 - 1, block_tokens=100_000, open_blocks=300),
        "3064974605 7457157389 1327249677 2883021069 3600315661 8449819317 467081495",
    ),
    (
        tl.Mixture(
            {range(8_000_000_000): 3, range(8_000_000_000, NUM_TOKENS): 1},
            tl.ShuffledBlocks(seed=0),
        ),
        "7712785410 9543576202 1254809602 2115832834 9335826101 6153676802 6389923615",
    ),
    (
        tl.Mixture(
            {range(8_000_000_000): 3, range(8_000_000_000, NUM_TOKENS): 1},
            tl.ShuffledEpochs(seed=0),
        ),
        "6508749194 9288701732 6397455754 4330531210 10183765267 1901104522 6738952722",
    ),
    (
        tl.Mixture(
            {range(8_000_000_000): 0.9, range(8_000_000_000, NUM_TOKENS): 0.1},
            tl.RandomWindows(seed=7),
        ),
        "4707725869 4532543131 619121600 6706949564 4053545909 2401894371 439950645",
    ),
    (
        tl.Mixture(
            {range(10**6): 5, range(10**6, 10**9): 3, range(10**9, NUM_TOKENS): 2},
            tl.ShuffledEpochs(1),
        ),
        "793833 931343337 212201 654569 827334988 968808 616795",
    ),
]


@pytest.mark.parametrize(("plan", "starts"), PLANS, ids=[repr(plan) for plan, _ in PLANS])
def test_the_samples_of_a_plan_are_those_of_every_release(plan, starts):
    assert window_starts(plan, SAMPLES) == [int(start) for start in starts.split()]


def test_an_evaluation_counts_the_same_windows_in_every_release():
    plan = tl.SequentialWindows()
    assert window_starts(plan, (0, 1, 1000, 10_008_663)) == [0, 1024, 1_024_000, 10_248_870_812]


def test_two_epochs_are_the_same_in_every_release():
    starts = window_starts(tl.ShuffledEpochs(seed=0), range(18), num_tokens=100, seq_len=10)
    assert starts[:9] == [50, 60, 40, 10, 20, 80, 0, 70, 30]
    assert starts[9:] == [4, 74, 14, 84, 54, 44, 24, 34, 64]
    starts = window_starts(tl.ShuffledBlocks(0, 30, open_blocks=2), range(18), num_tokens=100, seq_len=10)
    assert starts[:9] == [78, 68, 88, 58, 8, 38, 18, 48, 28]
    assert starts[9:] == [42, 12, 52, 22, 32, 82, 62, 2, 72]


def test_sample_i_is_row_i_of_the_batches_one_after_the_other():
    tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
    with tl.TokenLoader(tokens, batch_size=4, seq_len=10, plan=tl.ShuffledEpochs(0)) as loader:
        assert loader.window_starts(0).tolist() == [50, 60, 40, 10]
        assert loader.window_starts(2).tolist() == [30, 4, 74, 14]
        assert next(loader).inputs[:, 0].tolist() == [50, 60, 40, 10]


@pytest.mark.parametrize(
    ("dtype", "fingerprint"),
    [
        ("uint8", "uint8:100003:c867e2461cd779df"),
        ("uint16", "uint16:100003:9a1e3fe1aece0133"),
        ("uint32", "uint32:100003:d071d277e43a94a3"),
        ("int32", "int32:100003:d071d277e43a94a3"),
        ("int64", "int64:100003:d1b0520ee3307ee4"),
    ],
)
def test_tokens_keep_their_fingerprint(dtype, fingerprint):
    tokens = np.arange(100_003, dtype=np.int64) * 2_654_435_761 % 251
    assert tl.open_tokens(tokens.astype(dtype)).fingerprint() == fingerprint


def test_few_tokens_keep_their_fingerprint():
    tokens = tl.open_tokens(np.arange(7, dtype=np.uint16))
    assert tokens.fingerprint() == "uint16:7:2f5dc3a34e356af8"


def test_tokens_keep_their_full_fingerprint():
    tokens = (np.arange(2_500_000) * 2_654_435_761 % 251).astype(np.uint16)
    assert full_fingerprint(tl.open_tokens(tokens)) == (
        "uint16:2500000:0d36f4d8e1557859b12383bb24b8897d2c65cf1343e48b30ddacaa9f5b8b5a7e"
    )


def test_the_state_of_a_run_keeps_its_names_and_values():
    tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
    mixture = tl.Mixture({range(50): 3, range(50, 100): 1}, tl.ShuffledEpochs(seed=0))
    with tl.TokenLoader(tokens, 4, 10, plan=mixture) as loader:
        for _ in range(3):
            next(loader)
        state = loader.get_state()
    with tl.TokenLoader(tokens, 6, 10, plan=mixture) as loader:
        loader.set_state(state)
        next(loader)
        assert loader.get_state() == STATE


STATE = {
    "version": 2,
    "step": 4,
    "sample": 18,
    "batch_sizes": "0:0:4 3:12:6",
    "seq_len": 10,
    "plan": "Mixture({range(0, 50): 3, range(50, 100): 1}, ShuffledEpochs(seed=0))",
    "probe": "71acbe1b4a2d4c3d",
    "data": "uint16:100:b1380fb3b9ccb1ae",
}


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (tl.RandomWindows(seed=3), "RandomWindows(seed=3)"),
        (tl.ShuffledEpochs(seed=3, num_epochs=2), "ShuffledEpochs(seed=3)"),
        (
            tl.ShuffledBlocks(seed=3, num_epochs=2),
            "ShuffledBlocks(seed=3, block_tokens=262144, open_blocks=1024)",
        ),
        (tl.ShuffledBlocks(3, block_tokens=19, open_blocks=7), "ShuffledEpochs(seed=3)"),
        (tl.SequentialWindows(), "SequentialWindows()"),
        (
            tl.Mixture({range(50): 0.5, range(50, 100): 1}, tl.ShuffledEpochs(3, num_epochs=9)),
            "Mixture({range(0, 50): 1, range(50, 100): 2}, ShuffledEpochs(seed=3))",
        ),
        (
            tl.Mixture({range(50): 1, range(50, 100): 2}, tl.ShuffledBlocks(3, 30, 8, num_epochs=9)),
            "Mixture({range(0, 50): 1, range(50, 100): 2}, "
            "ShuffledBlocks(seed=3, block_tokens=30, open_blocks=8))",
        ),
    ],
    ids=repr,
)
def test_plans_keep_their_names_in_states(plan, key):
    assert plan.bind(100, 10).key(4) == key


# The JSON of commands. A name that is new in a release is added here; none is taken away or renamed.

SAME_DOCUMENTS = (
    "documents tokens examples examples.count examples.start examples.length examples.other_start"
)
SPEED = "tokens_per_second batches seconds wait_seconds gather_seconds transfer_seconds limit"


def under(parent, names):
    return f" {parent} " + " ".join(f"{parent}.{name}" for name in names.split())


FILES = (
    "tensors dtype num_tokens num_bytes batch_size seq_len windows_per_epoch steps_per_epoch "
    "cached_share cache_sampled" + under("files", "path format offset_bytes num_tokens")
)
JSON = {
    "info train.safetensors": FILES,
    "info train.safetensors --devices": FILES + under("devices", "backend name kind memory_bytes default"),
    "check train.safetensors --eos-id 0 --against train.safetensors --vocab-size 1000": (
        "num_tokens dtype problems notes lowest_id highest_id num_out_of_vocab first_out_of_vocab "
        "eos_id eos_side num_eos num_other_eos has_index num_documents num_empty median_length "
        "longest_length lengths num_runs run_tokens compared_one_in"
        + under("longest_runs", "token start stop")
        + under("repeated", SAME_DOCUMENTS)
        + under("shared", SAME_DOCUMENTS)
    ),
    "check train.safetensors --fingerprint": "fingerprint problems",
    "bench train.safetensors --batch-size 4 --seq-len 64 --seconds 0.1": (
        "device batch_size seq_len why_not_cold shuffled_blocks why_not_shuffled_blocks opening_seconds"
        + under("cold", SPEED)
        + under("warm", SPEED)
    ),
    "replay state.json train.safetensors --step 3 --eos-id 0": (
        "step" + under("rows", "sample start documents text")
    ),
    "tokenize text.txt --tokenizer tokenizer.json --out text.safetensors": (
        "num_documents num_tokens dtype eos_id text_bytes"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with files for every command."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("compatibility")
    document = np.arange(1, 200, dtype=np.uint16)
    run_of_one_token = np.full(100, 7, np.uint16)
    documents = [document, document[::-1], document, run_of_one_token]
    pieces = [piece for document in documents * 5 for piece in (document, [0])]
    tl.write_tokens(folder / "train.safetensors", pieces)
    with tl.open_tokens(folder / "train.safetensors") as tokens:
        loader = tl.TokenLoader(tokens, 4, 64, plan=tl.ShuffledEpochs(seed=0))
        (folder / "state.json").write_text(json.dumps(loader.get_state()))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("abba")
    return folder


def names_in(value, parent=""):
    """Names in JSON, those of an object within an object joined by dots; lists are looked into."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            for name, inner in item.items():
                yield f"{parent}{name}"
                yield from names_in(inner, f"{parent}{name}.")


@pytest.mark.parametrize("command", JSON)
def test_the_json_of_a_command_keeps_its_names(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["tokenloader", *command.split(), "--json"])
    with pytest.raises(SystemExit):
        main()
    printed = json.loads(capsys.readouterr().out)
    assert set(names_in(printed)) == set(JSON[command].split())
