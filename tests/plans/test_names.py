"""Names of plans: the key in a saved state gives the plan back, and no other text does anything."""

import re

import numpy as np
import pytest
from helpers import NAMED_PLANS

from tokenloader.formats.quoting import shown
from tokenloader.plans.names import MOST_SHOWN, bind_named

N = 997


@pytest.mark.parametrize("plan", NAMED_PLANS, ids=repr)
def test_the_key_of_a_plan_gives_the_plan(plan):
    bound = plan.bind(N, 20)
    for until_sample in (0, 7, 50):
        named = bind_named(bound.key(until_sample), until_sample, N, 20)
        if "num_epochs=30" not in repr(plan):
            assert named == bound
        assert named.key(until_sample) == bound.key(until_sample)
        np.testing.assert_array_equal(named.window_starts(range(50)), bound.window_starts(range(50)))


def test_a_plan_that_does_not_fit_the_tokens_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"^10 tokens are fewer than one window of seq_len"):
        bind_named("SequentialWindows()", 0, 10, 20)


@pytest.mark.parametrize(
    "name",
    [
        "EveryTen()",
        "",
        "ShuffledEpochs",
        "ShuffledEpochs()",
        "ShuffledEpochs(0)",
        "ShuffledEpochs(seed=-1)",
        "ShuffledEpochs(seed=0.0)",
        "ShuffledEpochs(seed=True)",
        "ShuffledEpochs(seed='0')",
        "ShuffledEpochs(seed=1 + 1)",
        "ShuffledEpochs( seed=0)",
        "ShuffledEpochs(seed=0, num_epochs=3)",
        "ShuffledEpochs(seed=18446744073709551616)",
        "ShuffledBlocks(seed=0)",
        "ShuffledBlocks(seed=0, block_tokens=100, open_blocks=0)",
        "ShuffledBlocks(seed=0, open_blocks=4, block_tokens=100)",
        "ShuffledBlocks(seed=0, block_tokens=39, open_blocks=4)",
        "ShuffledBlocks(seed=0, block_tokens=100, open_blocks=4, num_epochs=3)",
        "ShuffledEpochs(**{'seed': 0})",
        "ShuffledEpochs(seeds=0)",
        "tokenloader.ShuffledEpochs(seed=0)",
        "SequentialWindows(), 1",
        "SequentialWindows()\n",
        "__import__('os').abort()",
        "Mixture({}, SequentialWindows())",
        "Mixture({range(0, 500): 2}, SequentialWindows())",
        "Mixture({range(5): 1}, SequentialWindows())",
        "Mixture({range(0, 500): 1.5}, SequentialWindows())",
        "Mixture({**{}}, SequentialWindows())",
        "Mixture({range(0, 500): 1}, plan=SequentialWindows())",
        "Mixture({range(0, 500): 1}, abort())",
        "Mixture({open('x'): 1}, SequentialWindows())",
        "Mixture(" * 10_000,
        "-" * 100_000 + "1",
        "\0",
    ],
    ids=lambda name: repr(name[:50]),
)
def test_any_other_text_is_refused_with_the_way_in_python(name):
    with pytest.raises(ValueError, match="be told from the state alone; in Python") as caught:
        bind_named(name, 0, N, 20)
    message = str(caught.value)
    assert message.startswith(f"state: plan is {shown(name, MOST_SHOWN)}, which is none of RandomWindows,")
    assert re.search(r"set_state\(state\), and ask its window_starts\(step\)", message)


def test_a_name_is_shown_in_one_bounded_printable_line():
    for name, told in [
        ("Größe(seed=1)", "Größe(seed=1)"),
        ("\x1b[2J\n\u202e", r"\x1b[2J\n\u202e"),
        ("a" * 1000, "a" * 1000),
        ("b" + "a" * 10**6 + "c", "b" + "a" * 497 + "..." + "a" * 497 + "c"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"plan is {told}, which is none")):
            bind_named(name, 0, N, 20)
