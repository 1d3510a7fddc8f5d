"""A model's products in eight bits: learnable, and refused where no chip has them."""

import jax
import numpy as np
import pytest

from tpukit.errors import TPUModelError
from tpukit.hardware.target import target_chip
from tpukit.models import get_preset
from tpukit.models.matmul.matmul_format import check_matmul
from tpukit.step import Workload


def last_loss(matmul: str) -> float:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 100, np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - 33, size=(30, 8))
    windows = text[starts[..., None] + np.arange(33)].astype(np.int32)
    work = Workload(get_preset("tiny", n_layers=1, matmul=matmul), batch_size=8, sequence_length=32)
    state, step = jax.jit(work.init)(jax.random.key(0)), jax.jit(work.train_step)
    losses = []
    for window in windows:
        state, metrics = step(state, {"inputs": window[:, :-1], "targets": window[:, 1:]})
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    return float(np.mean(losses[-5:]))


@pytest.mark.parametrize(("matmul", "near"), [("float8", 0.03), ("int8", 0.01)])
def test_a_model_learns_as_with_wide_products(matmul, near):
    wide, narrow = last_loss("dtype"), last_loss(matmul)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=near)


@pytest.mark.parametrize(
    ("matmul", "has", "has_not", "words"),
    [
        ("float8", "7x", "v5e", r"float8.* of v5e; TPU .*7x.* Use int8 or bfloat16 here"),
        ("int8", "v5e", "7x", r"int8.* of 7x; TPU .*v6e.* Use float8 or bfloat16 here"),
    ],
)
def test_where_there_is_none(matmul, has, has_not, words):
    note = check_matmul(matmul)
    assert note is not None
    assert f"{matmul} is emulated on cpu" in note
    with target_chip(has):
        assert check_matmul(matmul) is None
    with target_chip(has_not), pytest.raises(TPUModelError, match=words):
        check_matmul(matmul)


def test_a_job_for_a_chip_without_it_is_refused_when_traced():
    work = Workload(get_preset("tiny", matmul="int8"), batch_size=8, sequence_length=32)
    with (
        target_chip("7x"),
        pytest.raises(TPUModelError, match="not supported by the matrix unit of 7x"),
    ):
        jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())
