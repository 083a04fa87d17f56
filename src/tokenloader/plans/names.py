"""Names of plans: from the key in a saved state back to the plan. The text is parsed, never run."""

import ast

from tokenloader.formats.quoting import shown
from tokenloader.plans.mixture import Mixture
from tokenloader.plans.plan import BoundPlan, Plan
from tokenloader.plans.random_windows import RandomWindows
from tokenloader.plans.sequential_windows import SequentialWindows
from tokenloader.plans.shuffled_blocks import ShuffledBlocks
from tokenloader.plans.shuffled_epochs import ShuffledEpochs

MOST_SHOWN = 1000  # characters of a plan's key in a message: that of a mixture is long

_SIMPLE_PLANS: dict[str, type[RandomWindows | ShuffledEpochs | ShuffledBlocks | SequentialWindows]] = {
    "RandomWindows": RandomWindows,
    "ShuffledEpochs": ShuffledEpochs,
    "ShuffledBlocks": ShuffledBlocks,
    "SequentialWindows": SequentialWindows,
}


def bind_named(key: str, until_sample: int, num_tokens: int, seq_len: int) -> BoundPlan:
    """Returns the plan, bound, that a saved state calls by a key; num_epochs, no part of it, is None.

    Raises ValueError if the key is none of tokenloader's own plans, or the plan does not fit the tokens.
    """
    unknown = ValueError(
        f"state: plan is {shown(key, MOST_SHOWN)}, which is none of {', '.join(_SIMPLE_PLANS)} and "
        f"Mixture, so its windows cannot be told from the state alone; in Python, make a TokenLoader with "
        f"that plan, set_state(state), and ask its window_starts(step) and window_tokens(step)"
    )
    plan = plan_named(key)
    if plan is None:
        raise unknown
    bound = plan.bind(num_tokens, seq_len)
    if bound.key(until_sample) != key:  # written in another way than keys are
        raise unknown
    return bound


def plan_named(key: str) -> Plan | None:
    """Returns the plan that a saved state calls by a key; None if it is none of tokenloader's own."""
    try:
        return _plan(ast.parse(key, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _plan(node: ast.expr) -> Plan:
    match node:
        case ast.Call(ast.Name("Mixture"), [ast.Dict(keys, values), plan], []):
            ranges = [_range(key) for key in keys]
            weights = [_integer(value) for value in values]
            return Mixture(dict(zip(ranges, weights, strict=True)), _plan(plan))
        case ast.Call(ast.Name(kind), [], keywords) if kind in _SIMPLE_PLANS:
            return _SIMPLE_PLANS[kind](
                **{str(keyword.arg): _integer(keyword.value) for keyword in keywords}
            )
    raise ValueError(f"{ast.unparse(node)} is no plan")


def _range(node: ast.expr | None) -> range:
    match node:
        case ast.Call(ast.Name("range"), [start, stop], []):
            return range(_integer(start), _integer(stop))
    raise ValueError("a source is no range(start, stop)")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
    raise ValueError(f"{ast.unparse(node)} is no integer of 0 or more")
