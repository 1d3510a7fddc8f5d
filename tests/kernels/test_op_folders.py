"""Every op is built alike: the same files, one way to differentiate, dimensions with names."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import tpukit.kernels
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op

ROOM = Path(tpukit.kernels.__file__).parent
FOLDERS = sorted(path for path in (ROOM / "ops").iterdir() if path.is_dir() and path.name[0] != "_")
KERNEL_FILES = {"triton_gpu.py", "cudnn_gpu.py"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_op_with_a_tpu_kernel_is_a_folder(folder):
    files = {path.name for path in folder.glob("*.py")}
    # It is listed, timed and tuned by the OP of its api.
    assert {"__init__.py", "api.py"} <= files
    assert "OP" in vars(import_module(f"tpukit.kernels.ops.{folder.name}.api"))
    named_gpu = {name for name in files if "gpu" in name}
    assert named_gpu <= KERNEL_FILES, "a GPU file says what it is"
    for path in folder.glob("*.py"):
        is_triton = bool(re.search(r"pallas import triton|pallas\.triton", path.read_text()))
        assert is_triton is (path.name == "triton_gpu.py"), path.name


def test_an_op_without_a_tpu_kernel_is_a_file():
    for path in (ROOM / "ops").glob("*.py"):
        assert "pltpu" not in path.read_text(), path.name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_package_holds_nothing_but_its_sentence(folder):
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("name", builtin_ops())
def test_dimensions_have_names(name):
    op = get_tpu_op(name)
    assert op.splits.free
    assert len(op.splits.arguments) >= len(op.differentiable)


@pytest.mark.parametrize("name", builtin_ops())
def test_the_documents_say_what_may_be_split(name):
    table = (ROOM.parents[2] / "docs" / "kernels.md").read_text().split("| may be split |")[1]
    row = next(line for line in table.splitlines() if f"`{name}`" in line)
    assert f"| `{get_tpu_op(name).splits.free}`" in row


def test_a_gradient_is_attached_in_one_place():
    holders = [path for path in ROOM.rglob("*.py") if "jax.custom_vjp" in path.read_text()]
    assert holders == [ROOM / "registry" / "dispatch.py"]
