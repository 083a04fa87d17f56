"""Contents: a hash of what a value is made of, which names it where its repr does not tell it from others.

numpy shortens and rounds what it prints, and an object's address is another in every process. So a bound
plan whose key shows either is named by its contents instead: the fields of dataclasses, the attributes of
plans, the items of tuples, lists, sets and dicts, and of arrays dtype, shape and bytes.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tokenloader.plans.plan import BoundPlan, Plan

_HIDES = re.compile(r"\.\.\.|\u2026|[Aa]rray\(| object at 0x| at 0x[0-9a-fA-F]+")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, Fraction, type(...))


def contents(
    value: object, stand_in: Callable[[object], object], most_array_bytes: float = math.inf
) -> str:
    """Returns a hash of a value, 32 hex digits, equal in every process that has the same.

    Args:
        stand_in: gives for a value of another kind than those above, or a larger array than
            most_array_bytes, one that is hashed in its place; or raises.
    """

    def digest(value: Any, inside: tuple[int, ...]) -> bytes:
        if id(value) in inside:  # a list that holds itself
            return b"%d up" % (len(inside) - inside.index(id(value)))

        def digests(values: Iterable[object]) -> list[bytes]:
            return [digest(each, (*inside, id(value))) for each in values]

        parts: list[bytes]
        if isinstance(value, Enum):
            parts = [value.name.encode()]
        elif isinstance(value, _PLAIN):
            parts = [repr(value).encode()]
        elif isinstance(value, type):
            parts = [value.__qualname__.encode()]
        elif (array := _as_array(value, most_array_bytes)) is not None:
            data = digests(array.tolist()) if array.dtype.hasobject else [array.tobytes()]
            parts = [f"{array.dtype.str}{array.shape}".encode(), *data]
        elif isinstance(value, tuple | list):
            parts = digests(value)
        elif isinstance(value, set | frozenset):
            parts = sorted(digests(value))
        elif isinstance(value, Mapping):
            parts = sorted(digests(value.items()))
        elif is_dataclass(value):
            parts = digests((field.name, getattr(value, field.name, None)) for field in fields(value))
        elif isinstance(value, Plan | BoundPlan):
            parts = digests([object.__getstate__(value)])
        else:
            parts = digests([stand_in(value)])
        return _hash(type(value), parts)

    return digest(value, ()).hex()


def _hash(kind: type, parts: Iterable[bytes]) -> bytes:
    whole = hashlib.blake2b(kind.__qualname__.encode(), digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


def named_plan(plan: object) -> BoundPlan:
    """Returns a bound plan; one whose key hides what it is made of gets a key with a hash of its contents.

    Raises TypeError if it is none, or its key is no text; ValueError if the key hides something that has no
    contents to hash.
    """
    if not isinstance(plan, BoundPlan):
        raise TypeError(
            f"the plan's bind returned {plan!r:.100}; expected an instance of tokenloader.BoundPlan"
        )
    key: object = plan.key(0)
    if not isinstance(key, str):
        raise TypeError(f"{type(plan).__qualname__}: key returned {key!r:.100}; expected a string")
    hidden = _HIDES.search(key)
    if hidden is None:
        return plan

    def refuse(value: object) -> NoReturn:
        raise ValueError(
            f"{type(plan).__qualname__}: key returned {key:.200}, in which {hidden[0]!r} hides what "
            f"decides the windows, and the plan has a {type(value).__qualname__}, whose contents have no "
            f"name; expected a text that tells all: of an array, blake2b(array.tobytes()).hexdigest()"
        )

    return _NamedByContents(plan, contents(plan, refuse))


class _NamedByContents(BoundPlan):
    """A bound plan whose key is cut where it hides something, and ends with a hash of the whole plan."""

    def __init__(self, plan: BoundPlan, digest: str) -> None:
        self._plan, self._digest = plan, digest

    def __repr__(self) -> str:
        return repr(self._plan)

    @property
    def num_samples(self) -> int | None:
        return self._plan.num_samples

    def window_starts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._plan.window_starts(samples)

    def valid_targets(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._plan.valid_targets(samples)

    def reads(self, samples: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._plan.reads(samples)

    def key(self, until_sample: int) -> str:
        shown = _HIDES.split(self._plan.key(until_sample), maxsplit=1)[0]
        return f"{shown:.200}<contents {self._digest}>"


def _as_array(value: Any, most_bytes: float) -> NDArray[Any] | None:
    """Returns an array or number of numpy or another library as a numpy array."""
    if not hasattr(value, "__array__") or getattr(value, "nbytes", math.inf) > most_bytes:
        return None
    try:
        return np.asarray(value)
    except Exception:  # its devices are other processes', it is a random key, or may not be transferred
        return None
