"""Tuned blocks: found by chip and bucket, refused when they are not what the kernel takes."""

import json

import jax
import pytest

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels import tpu_kernel, use_tuned_blocks
from tpukit.kernels.blocks import tuned
from tpukit.kernels.blocks.tuned import (
    TunedEntry,
    choose_blocks,
    data_folder,
    load_tuned,
    save_tuned,
)
from tpukit.kernels.blocks.vmem import vmem_capacity_bytes
from tpukit.kernels.ops.rms_norm.pallas_tpu import RowBlocks, bucket, row_case
from tpukit.kernels.registry.op import KernelCase, shape_bucket
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op

CHIPS = ("v4", "v5e", "v5p", "v6e", "7x")


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


CASE = KernelCase("c", (shape(1000, 4096), shape(4096, dtype="float32")), {"eps": 1e-5, "k": 2})


def entry(rows, of=CASE, **blocks):
    sizes = blocks or {"block_rows": rows}
    return TunedEntry(shape_bucket(of), sizes, 12.5, "model", {"jax": "1"}, 13.0, 7)


def chosen(folder, case=CASE):
    return choose_blocks("op", case, lambda case, chip: RowBlocks(16), folder=folder)


@pytest.fixture
def own_blocks():
    yield use_tuned_blocks
    use_tuned_blocks(None)


def test_a_bucket_rounds_sizes_up_and_forgets_floats():
    assert shape_bucket(CASE) == "bfloat16[1024,4096] float32[4096] k=2"
    larger = KernelCase("d", (shape(600, 4000), shape(3000, dtype="float32")), {"k": 2})
    assert shape_bucket(larger) == shape_bucket(CASE)


def test_rows_are_counted_however_they_are_stacked():
    assert bucket(row_case(shape(4, 250, 4096))) == bucket(CASE) == "bfloat16[1024,4096]"


def test_many_rows_or_tokens_are_one_bucket():
    assert bucket(row_case(shape(2**20, 4096))) == bucket(row_case(shape(8192, 4096)))


def test_blocks_come_from_the_file_of_the_chip_traced_for(tmp_path):
    save_tuned(tmp_path, "v6e", {shape_bucket(CASE): entry(512)})
    with target_chip("v6e"):
        assert chosen(tmp_path) == RowBlocks(512)
        other = KernelCase("e", (shape(8, 8),))
        assert chosen(tmp_path, other) == RowBlocks(16)
    with target_chip("v5e"):
        assert chosen(tmp_path) == RowBlocks(16)
    assert chosen(tmp_path) == RowBlocks(16)


def test_what_is_saved_is_read_back_in_order(tmp_path):
    small = KernelCase("s", (shape(8, 8),))
    entries = {shape_bucket(CASE): entry(512), shape_bucket(small): entry(8, small)}
    path = save_tuned(tmp_path, "v5p", entries)
    assert load_tuned(tmp_path, "v5p") == entries
    names = [item["bucket"] for item in json.loads(path.read_text())["entries"]]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a file of tuned blocks"),
        ('{"chip": "v5e", "entries": [{"bucket": "x"}]}', "is not a file of tuned blocks"),
        ('{"chip": "v6e", "entries": []}', "of another chip"),
        (
            '{"chip": "v5e", "entries": [{"bucket": "x", "blocks": {"a": 0}, "time_us": 1, '
            '"default_us": 1, "tried": 1, "origin": "model", "versions": {}}]}',
            "the blocks of x are not positive integers",
        ),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, message):
    (tmp_path / "v5e.json").write_text(text)
    load_tuned.cache_clear()
    with target_chip("v5e"), pytest.raises(TPUKernelError, match=message):
        chosen(tmp_path)


def test_a_folder_of_the_users_own_comes_before_what_is_shipped(tmp_path, monkeypatch, own_blocks):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    small = KernelCase("s", (shape(8, 8),))
    save_tuned(
        shipped,
        "v6e",
        {shape_bucket(CASE): entry(512), shape_bucket(small): entry(8, small)},
    )
    save_tuned(own / "op", "v6e", {shape_bucket(CASE): entry(64)})
    monkeypatch.setattr(tuned, "data_folder", lambda op: shipped)
    with target_chip("v6e"):
        assert chosen(None) == RowBlocks(512)
        own_blocks(own)
        assert chosen(None) == RowBlocks(64)
        assert chosen(None, small) == RowBlocks(8)
        own_blocks(None)
        assert chosen(None) == RowBlocks(512)


def test_a_folder_without_tuned_blocks_or_with_broken_ones_is_refused_at_once(tmp_path, own_blocks):
    with pytest.raises(TPUKernelError, match=r"holds no tuned blocks \(OP/CHIP.json\); write them"):
        own_blocks(tmp_path)
    (tmp_path / "rms_norm").mkdir()
    (tmp_path / "rms_norm" / "v6e.json").write_text("{")
    with pytest.raises(TPUKernelError, match="is not a file of tuned blocks"):
        own_blocks(tmp_path)
    assert tuned.tuned_folders("rms_norm") == [data_folder("rms_norm")]


def test_a_registered_op_takes_blocks_of_the_users_own(tmp_path, own_blocks):
    taken = []

    @tpu_kernel(
        on_tpu=lambda x, *, blocks: taken.append(blocks) or x,
        default_blocks=lambda case, chip: RowBlocks(16),
    )
    def mine(x):
        return x

    array = shape(64, 128)
    kept = entry(32, KernelCase("c", (array,)))
    save_tuned(tmp_path / "mine", "v5e", {kept.bucket: kept})
    own_blocks(tmp_path)
    with target_chip("v5e"):
        jax.eval_shape(lambda x: mine(x, implementation="pallas_tpu"), array)
    assert set(taken) == {RowBlocks(32)}


def test_blocks_of_another_kernel_are_refused(tmp_path):
    save_tuned(tmp_path, "v5e", {shape_bucket(CASE): entry(0, block_q=128)})
    with target_chip("v5e"), pytest.raises(TPUKernelError, match="name block_q, but the kernel"):
        chosen(tmp_path)


@pytest.mark.parametrize("name", builtin_ops())
def test_shipped_entries_are_what_dispatch_takes_for_a_case_of_the_op(name):
    op = get_tpu_op(name)
    cases = {op.bucket(case): case for case in op.cases}
    for chip in CHIPS:
        for kept in load_tuned(data_folder(name), chip).values():
            case = cases[kept.bucket]
            with target_chip(chip):
                taken = choose_blocks(name, case, op.default_blocks, bucket=op.bucket)
            assert taken.to_dict() == kept.blocks, f"{name} on {chip}: {kept.bucket}"
            assert op.vmem_bytes(case, taken) <= vmem_capacity_bytes(chip)


@pytest.mark.parametrize("name", builtin_ops())
def test_dispatch_takes_the_blocks_kept_for_the_bucket(name, tmp_path, monkeypatch):
    op = get_tpu_op(name)
    case = op.cases[0]
    # Both passes where there are two: some kernels have blocks in the backward one alone.
    direction = "backward" if op.differentiable else "forward"

    def traced(blocks=None):
        bound = op.bind(case, blocks=blocks, direction=direction)
        with target_chip("v6e"):
            return str(jax.make_jaxpr(bound)(*case.arguments))

    usual = traced()
    other = next(blocks for blocks in op.block_space(case, "v6e") if traced(blocks) != usual)
    kept = TunedEntry(op.bucket(case), other.to_dict(), 1.0, "model", {}, 1.0, 2)
    save_tuned(tmp_path, "v6e", {kept.bucket: kept})
    monkeypatch.setattr(tuned, "data_folder", lambda op: tmp_path)
    assert traced() == traced(other) != usual
