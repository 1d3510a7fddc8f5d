"""Every op is built alike: the same files, one way to differentiate, dimensions with names."""

import ast
import re
from pathlib import Path

import pytest

import tpukit.kernels
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op

ROOM = Path(tpukit.kernels.__file__).parent
FOLDERS = sorted(path for path in (ROOM / "ops").iterdir() if path.is_dir() and path.name[0] != "_")
KERNEL_FILES = {"pallas_tpu.py", "triton_gpu.py", "cudnn_gpu.py"}


def test_an_op_is_a_folder():
    assert [path.name for path in (ROOM / "ops").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_its_files_have_the_names_of_all_ops(folder):
    files = {path.name for path in folder.glob("*.py")}
    assert {"__init__.py", "api.py", "reference.py"} <= files
    assert files & KERNEL_FILES, "an op without a kernel is a function"
    # What has a kernel for TPUs is listed, timed and tuned.
    assert ("specs.py" in files) is ("pallas_tpu.py" in files)
    named_gpu = {name for name in files if "gpu" in name}
    assert named_gpu <= KERNEL_FILES, "a GPU file says what it is"
    for path in folder.glob("*.py"):
        is_triton = bool(re.search(r"pallas import triton|pallas\.triton", path.read_text()))
        assert is_triton is (path.name == "triton_gpu.py"), path.name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_package_holds_nothing_but_its_sentence(folder):
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("name", builtin_ops())
def test_blocks_have_a_file_and_dimensions_have_names(name):
    op = get_tpu_op(name)
    for function in (op.default_blocks, op.block_space, op.vmem_bytes):
        assert function.__module__.endswith(".blocks")
    assert op.splits.free
    assert len(op.splits.arguments) >= len(op.differentiable)


@pytest.mark.parametrize("name", builtin_ops())
def test_the_documents_say_what_may_be_split(name):
    table = (ROOM.parents[2] / "docs" / "kernels.md").read_text().split("| may be split |")[1]
    row = next(line for line in table.splitlines() if f"`{name}`" in line)
    assert f"| `{get_tpu_op(name).splits.free}`" in row


def test_a_gradient_is_attached_in_one_place():
    holders = [path for path in ROOM.rglob("*.py") if "jax.custom_vjp" in path.read_text()]
    assert holders == [ROOM / "registry" / "gradient.py"]
