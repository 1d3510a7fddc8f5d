"""The front door: what is exported, that it is cheap, silent, and drags nothing heavy in."""

import ast
import subprocess
import sys
from importlib import import_module

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
