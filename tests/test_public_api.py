"""The front door: what is exported, that it is cheap, silent, and drags nothing heavy in."""

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import tpukit
from tpukit import errors, lazy


def run_fresh(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )


def test_all_is_what_can_be_imported():
    assert tpukit.__all__ == sorted(tpukit.__all__)
    for name in tpukit.__all__:
        assert getattr(tpukit, name) is not None
    assert set(dir(tpukit)) == {*tpukit.__all__}


@pytest.mark.parametrize("package", lazy.LAZY_PACKAGES)
def test_type_checkers_see_the_same_names(package):
    homes = import_module(f"tpukit{package}").HOMES
    tree = ast.parse(lazy.stub_path(package).read_text())
    seen = {
        (f"{'.' * node.level}{node.module}", alias.asname)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for module, names in homes.items() for name in names}


def test_rooms_export_what_they_list():
    for room in (
        *("hardware", "compiler", "kernels", "parallel", "models", "step", "job"),
        *("records", "training", "observe", "torch"),
    ):
        module = getattr(__import__(f"tpukit.{room}"), room)
        for name in module.__all__:
            assert hasattr(module, name), f"tpukit.{room}.__all__ lists {name}"
        assert sorted(set(module.__all__)) == sorted(module.__all__)


PACKAGES = (
    *("", ".checker", ".compiler", ".hardware", ".job", ".kernels", ".models", ".observe"),
    *(".parallel", ".planner", ".pods", ".quantization", ".records", ".step", ".torch"),
    ".training",
)
# Where no type or protocol says more, and why.
ANY_IS_MEANT = {
    "Job.model": "a name, or a model of any framework",
    "Job.load_model": "a model of any framework",
}


def test_no_public_signature_says_any_where_a_type_can():
    said = {place for home in public_homes() for place in places_of_any(*home)}
    assert said == {*ANY_IS_MEANT}


def public_homes():
    """Yield each exported function and class: where it is written, and its name there."""
    for package in PACKAGES:
        module = import_module(f"tpukit{package}")
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            home = sys.modules.get(getattr(thing, "__module__", None) or "")
            if home is not None and home.__name__.startswith("tpukit."):
                yield home.__file__, getattr(thing, "__name__", name)


def places_of_any(path, name):
    """Yield arguments, results and fields of `name` in a file that are nothing but Any."""
    for node in parsed(path).body:
        if getattr(node, "name", None) != name:
            continue
        for one in [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", ()):
            own = "" if one is node else f"{name}."
            if isinstance(one, ast.AnnAssign) and is_any(one.annotation):
                yield own + one.target.id
            if not isinstance(one, ast.FunctionDef) or is_private(one.name):
                continue
            arguments = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
            yield from (f"{own}{one.name}.{a.arg}" for a in arguments if is_any(a.annotation))
            if is_any(one.returns):
                yield f"{own}{one.name}"


def is_private(name):
    return name.startswith("_") and name not in ("__init__", "__call__")


def is_any(annotation):
    if isinstance(annotation, ast.BinOp):  # `Any | None` says no more
        return is_any(annotation.left) or is_any(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


@cache
def parsed(path):
    return ast.parse(Path(path).read_text())


def test_import_is_silent_and_light():
    result = run_fresh(
        "import sys, tpukit; "
        "heavy = [m for m in ('jax', 'torch', 'flax', 'numpy', 'pydantic', 'rich') "
        "if m in sys.modules]; "
        "import logging; assert not logging.getLogger('tpukit').handlers; "
        "assert not heavy, heavy"
    )
    assert result.stdout == result.stderr == ""


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = tpukit.nonsense


def test_every_error_descends_from_the_root():
    named_in_the_documents = [
        *("TPUError", "TPUBackendError", "TPUNotAvailableError", "XLACompilationError"),
        *("TPUMemoryError", "TPUOutOfMemoryError", "TPUValidationError", "TPUDistributedError"),
        *("PodUnavailable", "CommunicationTimeout", "OutOfMemory"),
    ]
    for name in named_in_the_documents:
        assert issubclass(getattr(errors, name), errors.TPUError)
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TPUError)
    }
    drawn = (errors.__doc__ or "").split()
    assert classes - {"OutOfMemory"} <= set(drawn), "the tree at the top of the file is not whole"
    assert len(classes) >= 13
