"""Names of transforms: equal for what is the same, others for another constant, wherever it comes from."""

import functools
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tokenloader as tl
from tokenloader.loader.transform_names import transform_names

FIRST, HELPER = 1, 1


def read_global(block):
    return [row * FIRST for row in block]


def with_helper(block):
    return helper(block)


def helper(block):
    return block * HELPER if len(block) else with_helper(block)  # which call each other


def in_module(function, **values):
    """A function of this module, read in a process that has other values of its globals."""
    others = {**globals(), **values}
    for name in ("with_helper", "helper", "read_global"):
        code = others[name].__code__
        others[name] = types.FunctionType(code, others, name)
    return others[function]


def scaled(block, by):
    return block * by


def closing_over(value):
    return lambda block: block * value


def with_default(value):
    return lambda block, by=value: block * by


def nested(value):
    def inner(block):
        return block * value

    return lambda block: [inner(row) for row in block]


def decorated(value):
    @functools.wraps(scaled)
    def wrapper(block):
        return closing_over(value)(block)

    return wrapper


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, block):
        return block * self.by


@dataclass(frozen=True)
class Frozen:
    by: object

    def __call__(self, block):
        return block * self.by

    def scale(self, block):
        return block * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, block):
        return block * self.by


MAKERS = {
    "closure": closing_over,
    "default": with_default,
    "partial": lambda value: functools.partial(scaled, by=value),
    "jitted closure": lambda value: jax.jit(closing_over(value)),
    "partial of a closure": lambda value: functools.partial(closing_over(value)),
    "function within": nested,
    "decorated": decorated,
    "callable object": Scale,
    "dataclass": Frozen,
    "method of a dataclass": lambda value: Frozen(value).scale,
    "object with slots": Slotted,
    "global": lambda value: in_module("read_global", FIRST=value),
    "global of a helper": lambda value: in_module("with_helper", HELPER=value),
}
CONSTANTS = [
    (1, 2),
    (0.1, 0.2),
    ("a", "b"),
    ((1, 2), (2, 1)),
    ([1], [2]),
    ({"a": 1}, {"a": 2}),
    (np.arange(2000), np.arange(2000)[::-1]),
    (np.float32(1), np.float32(2)),
    (jnp.arange(3), jnp.arange(3) + 1),
    (np.zeros(300_000), np.zeros(300_001)),  # of large ones the shape
    (helper, scaled),
    (Frozen(1), Frozen(2)),
]


@pytest.mark.parametrize("constants", CONSTANTS, ids=lambda pair: str(pair[0])[:20])
@pytest.mark.parametrize("kind", MAKERS)
def test_another_constant_makes_another_transform(kind, constants):
    one, other = constants
    make = MAKERS[kind]
    assert transform_names(make(one)) == transform_names(make(one))
    digests = [transform_names(make(value))["code and values of the transform"] for value in (one, other)]
    assert digests[0] != digests[1]


def test_other_code_makes_another_transform():
    def transform(block):
        return block * 2

    names = transform_names(transform)

    def transform(block):
        return block * 3

    assert names["transform"] == transform_names(transform)["transform"]
    assert names != transform_names(transform)


def test_ours_are_told_apart_by_name_and_contents():
    transforms = None, tl.next_token, tl.segment_documents(7), tl.segment_documents(8)
    names = [transform_names(transform) for transform in transforms]
    assert [each["transform"] for each in names] == [
        "None", "next_token", "SegmentDocuments(eos_id=7)", "SegmentDocuments(eos_id=8)",
    ]  # fmt: skip
    assert len({each["code and values of the transform"] for each in names}) == 4


def test_what_other_objects_hold_is_not_compared():
    class Model:
        def __init__(self, host):
            self.host = host

        def transform(self, block):
            return block

    assert transform_names(Model(0).transform) == transform_names(Model(1).transform)
    assert transform_names(closing_over(Model(0))) == transform_names(closing_over(Model(1)))
