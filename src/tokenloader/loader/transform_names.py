"""Names of transforms: what the processes of a run compare of the transforms that they were given.

A transform is code, and code has no name that tells it from others. Compared are its own name, its
bytecode, and what it has its values from: closures, defaults, arguments of a partial, globals of its module
that it reads, attributes of a callable object. Of these, plain values, arrays of up to 1 MiB, containers of
both, dataclasses, and functions with what they have in their turn are compared; of other objects the type.
"""

import dis
import functools
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from tokenloader.plans.contents import contents

_MOST_ARRAY_BYTES = 1 << 20  # arrays of parameters, which a method's object may hold, are larger

_LIBRARIES = ("jax", "jaxlib", "numpy")  # whose functions are compared by name: they keep caches


def transform_names(transform: object) -> dict[str, Any]:
    """Returns what must be equal in all processes, by the name that an error has for it."""
    seen: dict[types.FunctionType, None] = {}  # in order: globals are those of the first one's module

    def stand_in(value: object) -> object:
        if isinstance(value, types.FunctionType):
            if value in seen or str(value.__module__).partition(".")[0] in _LIBRARIES:
                return value.__qualname__
            seen[value] = None
            home = next(iter(seen)).__globals__
            read = dict(_globals_read(value)) if value.__globals__ is home else {}
            defaults = (value.__defaults__, value.__kwdefaults__)
            return value.__qualname__, value.__code__, defaults, _closed_over(value), read
        return _stand_in(value)

    call = inspect.getattr_static(transform, "__call__", None)
    root = transform
    if isinstance(call, types.FunctionType):  # an object of a user's class
        root = call, transform if is_dataclass(transform) else object.__getstate__(transform)
    return {
        "transform": _stable_name(transform),
        "code and values of the transform": contents(root, stand_in, _MOST_ARRAY_BYTES),
    }


def _stable_name(value: object) -> str:
    """Returns a name for a value that is equal in every process."""
    if type(value).__repr__ is not object.__repr__ and not hasattr(value, "__qualname__"):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # a partial's shows its function's
    return getattr(value, "__qualname__", type(value).__qualname__)


def _stand_in(value: object) -> object:
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_consts, value.co_names
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if callable(value) and hasattr(value, "__wrapped__"):  # of jax.jit, for one
        return value.__wrapped__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value.dtype), tuple(value.shape)
    return getattr(value, "__qualname__", None)  # the type of an object is in the hash already


def _closed_over(function: types.FunctionType) -> dict[str, object]:
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            values[name] = None
    return values


def _globals_read(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    # In the order of names, since the first function of several that call each other is hashed whole.
    for name in sorted(_global_names(function.__code__)):
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
            yield name, value


def _global_names(code: types.CodeType) -> set[str]:
    read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return read.union(*map(_global_names, nested))
