"""What the package is made of: which module may import which, what is public, what it says of itself."""

import ast
import doctest
import importlib
import inspect
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_python

import tokenloader as tl

PACKAGE = Path(tl.__file__).parent

# The only files that may import jax. Everything below the package `batches` works without it.
JAX_FILES = {
    "batches/batch.py",
    "batches/split_sequences.py",
    "check/bench.py",
    "check/devices.py",
    "loader/agreement.py",
    "loader/pipeline.py",
    "loader/setup.py",
    "loader/shared_reads.py",
    "loader/sharding.py",
    "loader/token_loader.py",
    "loader/transfer.py",
    "loader/transforms.py",
}
TYPE_ALIASES = {"Residency", "Source", "Transform"}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(file):
    """The modules that a file's source imports, anywhere in it."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield node.module


@pytest.mark.parametrize("file", FILES)
def test_jax_enters_in_named_files_only(file):
    needs_jax = any(module.split(".")[0] in ("jax", "jaxlib") for module in imports(file))
    assert needs_jax == (file in JAX_FILES)


def test_tokens_and_plans_need_neither_jax_nor_the_hub(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert (
        run_python(f"""if True:
        import sys
        import tokenloader as tl
        dir(tl), tl.__all__, tl.__version__
        tokens = tl.open_tokens({str(tmp_path / "a.bin")!r}, dtype="uint16")
        tokens.fingerprint(), tokens[3:5], tokens.gather([1, 2], 5)
        mixture = tl.Mixture({{range(0, 50): 1, range(50, 100): 2}}, tl.RandomWindows(0))
        shuffled = tl.ShuffledEpochs(0), tl.ShuffledBlocks(0)
        for plan in tl.RandomWindows(0), *shuffled, tl.SequentialWindows(), mixture:
            plan.bind(100, 9).window_starts([0, 1])
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
    assert name in TYPE_ALIASES or value.__name__ == name
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
    assert of_ours | TYPE_ALIASES == set(tl.__all__)
    assert len(tl.__all__) == len(set(tl.__all__))


def test_dir_is_all_before_and_after_the_lazy_names_are_used():
    assert dir(tl) == sorted(tl.__all__)
    assert run_python("import tokenloader as tl; print(dir(tl) == sorted(tl.__all__))") == "True\n"


def test_an_unknown_name_is_an_attribute_error_that_shows_it():
    with pytest.raises(AttributeError, match="module 'tokenloader' has no attribute 'DataLoader'"):
        tl.DataLoader  # noqa: B018
    assert not hasattr(tl, "jax")


def test_star_import_gives_all():
    namespace = {}
    exec("from tokenloader import *", namespace)
    assert set(tl.__all__) <= namespace.keys()


def public_things():
    for name in sorted(set(tl.__all__) - TYPE_ALIASES):
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


@pytest.mark.parametrize("file", FILES)
def test_every_module_begins_by_saying_what_it_is(file):
    first = ast.get_docstring(ast.parse((PACKAGE / file).read_text())).splitlines()[0]
    assert len(first) > 20


def examples(file):
    """The examples in the docstrings of a file, also of classes that name another module as theirs."""
    name = ".".join(("tokenloader", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    source = (PACKAGE / file).read_text()
    defined = {node.name for node in ast.parse(source).body if isinstance(node, DEFINITIONS)}
    globs = {**vars(module), **vars(tl), "tl": tl, "np": np, "jnp": jnp}
    found = finder.find(module, globs=globs)
    for name in defined:
        # Given as a module, an object is searched whatever its __module__ says.
        found += finder.find(getattr(module, name), name, module=False, globs=globs)
    return {test.name.rpartition("tokenloader.")[2]: test for test in found if test.examples}


DEFINITIONS = ast.FunctionDef, ast.ClassDef


@pytest.mark.parametrize("file", FILES)
def test_the_examples_in_docstrings_are_true(file):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(file).values():
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("loader/token_loader.py", 1),
        ("plans/plan.py", 1),
        ("batches/batch.py", 2),
        ("tokens/token_array.py", 1),
        ("tokens/opening.py", 1),
    ],
)
def test_there_are_examples_in_docstrings(file, least):
    assert len(examples(file)) >= least


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
