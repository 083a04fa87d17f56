"""What the package is made of: which module may import which, what is public, what it says of itself."""

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tokenloader as tl

PACKAGE = Path(tl.__file__).parent

# Ground floor first: a module imports only from those before it. A new file is placed here.
ROOMS = [
    "_philox",
    "_permutation",
    "_advice",
    "_memory",
    "_extent",
    "_safetensors",
    "_indexed",
    "_formats",
    "_shards",
    "_storage",
    "_gather",
    "_hub",
    "_tokens",
    "_open",
    "_plans",
    "_write",
    "_info",
    "_convert",
    "_scan",
    "_documents",
    "_repeats",
    "_runs",
    "_suspicion",
    "_check",
    "_text",
    "_tokenize",
    "_mixture",
    "_windows",
    "_stats",
    "_placement",
    "_agreement",
    "_batch",
    "_sequence",
    "_transform",
    "_transfer",
    "_prefetch",
    "_pipeline",
    "_history",
    "_state",
    "_replay",
    "_loader",
    "_devices",
    "_bench",
    "_screens",
    "_console",
    "cli",
    "__main__",
    "__init__",
]
JAX_ROOMS = {
    "_placement",
    "_agreement",
    "_batch",
    "_sequence",
    "_transform",
    "_transfer",
    "_pipeline",
    "_loader",
    "_devices",
    "_bench",
}


def imports(room):
    """The modules that a room's source imports, anywhere in it."""
    for node in ast.walk(ast.parse((PACKAGE / f"{room}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{room}: imports are absolute"
            if node.module == "tokenloader":
                yield from (f"tokenloader.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_file_has_its_place():
    assert sorted(path.stem for path in PACKAGE.rglob("*.py")) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_to_the_ground(room):
    below = ROOMS[: ROOMS.index(room)]
    for module in imports(room):
        package, _, name = module.partition(".")
        if package == "tokenloader":
            assert name in below, f"{room} imports {module}, which is not below it"


@pytest.mark.parametrize("room", ROOMS)
def test_jax_enters_in_named_files_only(room):
    needs_jax = any(module.split(".")[0] in ("jax", "jaxlib") for module in imports(room))
    assert needs_jax == (room in JAX_ROOMS)


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_tokens_and_plans_need_neither_jax_nor_the_hub(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert (
        run(f"""if True:
        import sys
        import tokenloader as tl
        dir(tl), tl.__all__, tl.__version__
        tokens = tl.open_tokens({str(tmp_path / "a.bin")!r}, dtype="uint16")
        tokens.fingerprint(), tokens[3:5], tokens.gather([1, 2], 5)
        mixture = tl.Mixture({{range(0, 50): 1, range(50, 100): 2}}, tl.RandomWindows(0))
        for plan in tl.RandomWindows(0), tl.ShuffledEpochs(0), tl.SequentialWindows(), mixture:
            plan.starts([0, 1], num_tokens=100, seq_len=9)
        tokens.close()
        print(sorted({{"jax", "jaxlib", "huggingface_hub"}} & sys.modules.keys()))
        tl.TokenLoader
        print("jax" in sys.modules)
    """)
        == "[]\nTrue\n"
    )


@pytest.mark.parametrize("name", tl.__all__)
def test_every_public_name_can_be_had_from_a_fresh_import(name):
    value = getattr(tl, name)
    assert value.__name__ == name or name in str(value)
    namespace = {}
    exec(f"from tokenloader import {name}", namespace)
    assert namespace[name] is value


def test_all_is_the_public_names():
    for name in tl.__all__:
        getattr(tl, name)  # the lazy ones are there once used
    of_ours = {
        name
        for name, value in vars(tl).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "").startswith("tokenloader")
    }
    assert of_ours == set(tl.__all__)
    assert len(tl.__all__) == len(set(tl.__all__))


def test_dir_is_all_before_and_after_the_lazy_names_are_used():
    assert dir(tl) == sorted(tl.__all__)
    assert run("import tokenloader as tl; print(dir(tl) == sorted(tl.__all__))") == "True\n"


def test_an_unknown_name_is_an_attribute_error_that_shows_it():
    with pytest.raises(AttributeError, match="module 'tokenloader' has no attribute 'DataLoader'"):
        tl.DataLoader  # noqa: B018
    assert not hasattr(tl, "jax")


def test_star_import_gives_all():
    namespace = {}
    exec("from tokenloader import *", namespace)
    assert set(tl.__all__) <= namespace.keys()


def public_things():
    for name in tl.__all__:
        thing = getattr(tl, name)
        yield name, thing
        if inspect.isclass(thing):
            for member in vars(thing):
                value = inspect.getattr_static(thing, member)
                # A NamedTuple's fields are attributes, and its class's docstring describes them.
                if not member.startswith("_") and (
                    inspect.isfunction(value) or isinstance(value, (property, classmethod))
                ):
                    yield f"{name}.{member}", value


PUBLIC = dict(public_things())


@pytest.mark.parametrize("name", PUBLIC)
def test_whatever_is_public_has_a_docstring_of_its_own(name):
    thing = PUBLIC[name]
    doc = thing.__doc__
    assert doc, name
    first = doc.strip().splitlines()[0]
    assert len(first) > 10, name
    if inspect.isclass(thing):
        assert not doc.startswith(f"{name}("), f"{name} has the docstring that dataclass made"


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_begins_by_saying_what_it_is(room):
    first = ast.get_docstring(ast.parse((PACKAGE / f"{room}.py").read_text())).splitlines()[0]
    assert len(first) > 20


def module_of(room):
    return importlib.import_module("tokenloader" if room == "__init__" else f"tokenloader.{room}")


@pytest.mark.parametrize("room", ROOMS)
def test_the_examples_in_docstrings_are_true(room):
    module = module_of(room)
    failed, _ = doctest.testmod(
        module,
        extraglobs={**vars(tl), "tl": tl, "np": np, "jnp": jnp},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = {room: len(finder.find(module_of(room))) for room in ROOMS}
    assert counts["_loader"] >= 1
    assert counts["_plans"] >= 3
    assert counts["_batch"] >= 2
    assert counts["_tokens"] >= 1
    assert counts["_open"] >= 1


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
