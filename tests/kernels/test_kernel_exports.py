"""What `tpukit.kernels` offers is there under its name: functions, not the folders of that name."""

import inspect

import tpukit.kernels
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op


def test_every_name_is_offered_once():
    names = tpukit.kernels.__all__
    assert len(names) == len(set(names))
    assert not [name for name in names if inspect.ismodule(getattr(tpukit.kernels, name))]


def test_every_op_is_offered_as_its_function():
    for name in builtin_ops():
        offered = getattr(tpukit.kernels, name)
        assert inspect.isfunction(offered), name
        assert offered.__module__.startswith(f"tpukit.kernels.ops.{name}."), name
        assert get_tpu_op(name).name == name


def test_a_folder_can_still_be_imported_from():
    from tpukit.kernels.ops.rope import rope_tables

    assert tpukit.kernels.rope_tables is rope_tables
