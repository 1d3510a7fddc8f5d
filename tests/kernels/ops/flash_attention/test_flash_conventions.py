"""`flash_attention` means what attention means in jax, and in the documents that describe it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels import tpu_kernel
from tpukit.kernels.ops.flash_attention.api import flash_attention

X = jnp.zeros((1, 256, 4, 64))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"window": 9}, {"local_window_size": (8, 8)}),
        ({"window": 9, "causal": True}, {"is_causal": True, "local_window_size": (8, 0)}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ],
)
@pytest.mark.parametrize("kind", [None, "scores", "keys"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_everything_means_what_it_means_in_jax(
    ours: dict[str, Any],
    theirs: dict[str, Any],
    kind: str | None,
    implementation: str | None,
    judge: Any,
) -> None:
    arrays = judge.arrays(2, 40, 48, 4, 2, 16, "float32")
    mask = None
    if kind is not None:
        # Where nothing is allowed jax gives the mean of all values.
        mask = judge.mask(kind, (2, 4, 40, 48)) | np.eye(40, 48, dtype=bool)

    def attend(*inputs: Any) -> Any:
        return flash_attention(*inputs, mask=mask, implementation=implementation, **ours)

    def attend_in_jax(*inputs: Any) -> Any:
        given = None if mask is None else jnp.asarray(mask)
        return jax.nn.dot_product_attention(*inputs, mask=given, **theirs)

    judge.agree(judge.passes(attend, arrays), judge.passes(attend_in_jax, arrays), 1e-5)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_queries_without_any_key_give_zeros_and_finite_gradients(
    implementation: str | None, judge: Any
) -> None:
    arrays = judge.arrays(1, 20, 30, 2, 1, 16, "float32")
    mask = np.ones((20, 30), bool)
    mask[[3, 19]] = False

    def attend(*inputs: Any) -> Any:
        return flash_attention(*inputs, mask=mask, implementation=implementation)

    out, dq, dk, dv = judge.passes(attend, arrays)
    for x in (out, dq):
        assert not x[:, [3, 19]].any()
        assert x[:, [2, 4]].all()
    assert all(np.isfinite(x).all() for x in (dk, dv))
    assert not flash_attention(*arrays[:3], mask=jnp.zeros((1, 1), bool)).any()


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_heads_may_come_before_tokens(implementation: str | None, judge: Any) -> None:
    arrays = judge.arrays(2, 24, 30, 4, 2, 16, "float32")
    options: dict[str, Any] = {
        "mask": judge.mask("all", (2, 4, 24, 30)),
        "segment_ids": (jnp.arange(48).reshape(2, 24) // 40, jnp.zeros((2, 30), int)),
        "window": 11,
        "implementation": implementation,
    }
    tokens_first = judge.passes(lambda *a: flash_attention(*a, **options), arrays)
    by_head = [x.swapaxes(1, 2) for x in arrays]
    heads_first = judge.passes(lambda *a: flash_attention(*a, layout="BHSD", **options), by_head)
    judge.agree([x.swapaxes(1, 2) for x in heads_first], tokens_first, 1e-6)


def test_narrow_heads_before_tokens_inside_a_program(judge: Any) -> None:
    """XLA for CPUs has no product of the transposed arrays, and must not be given one."""
    arrays = [x.swapaxes(1, 2) for x in judge.arrays(2, 16, 16, 4, 2, 16, "bfloat16")]
    attend = functools.partial(flash_attention, layout="BHSD")
    inside = judge.passes(jax.jit(attend), arrays)
    by_rows = judge.passes(flash_attention, [x.swapaxes(1, 2) for x in arrays])
    judge.agree([x.swapaxes(1, 2) for x in inside], by_rows, 0)


def test_the_layer_of_the_documents_runs_with_and_without_a_mask(judge: Any) -> None:
    @tpu_kernel(use_efficient_attention=True)
    def self_attention_layer(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        return flash_attention(query, key, value, mask=mask, block_size=128, use_flash=True)

    arrays = judge.arrays(2, 256, 256, 2, 2, 32, "float32")
    causal = np.tri(256, dtype=bool)
    for mask in (causal, causal[None, None], judge.mask("keys", (2, 2, 256, 256))):
        seen = judge.passes(
            lambda *a, mask=mask: self_attention_layer(*a, jnp.asarray(mask)), arrays
        )
        judge.agree(seen, judge.truth(arrays, mask), 2e-5)
    judge.agree(judge.passes(self_attention_layer, arrays), judge.truth(arrays, True), 2e-5)
    judge.agree(
        judge.passes(lambda *a: flash_attention(*a, causal=True), arrays),
        judge.truth(arrays, causal),
        2e-5,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((256, 256))}, "takes booleans, .* got float64; compare it"),
        ({"mask": np.ones((2, 1, 256, 256), bool)}, r"\(2, 1, 256, 256\), which neither broadc"),
        ({"mask": np.ones((1, 1, 1, 256, 256), bool)}, "neither broadcasts"),
        ({"mask": np.ones((256, 255), bool)}, r"= \(1, 4, 256, 256\) nor has a value for each bl"),
        ({"layout": "BHDS"}, "expected 'BSHD' or 'BHSD'. Did you mean 'B"),
        ({"layout": "bshd"}, "Did you mean 'BSHD'"),
    ],
)
def test_refusals_teach(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TPUKernelError, match=message):
        flash_attention(X, X, X, **options)


def test_an_implementation_that_reads_no_mask_is_refused_with_the_way_out() -> None:
    x = X.astype(jnp.bfloat16)
    message = "cannot run as 'cudnn' here: a mask .* use implementation='xla', or None"
    with pytest.raises(TPUKernelError, match=message):
        flash_attention(x, x, x, mask=np.ones((256, 256), bool), implementation="cudnn")


def test_refusals_name_the_axes_of_the_layout() -> None:
    with pytest.raises(TPUKernelError, match=r"q \(B, H, S, D\) and k, v \(B, KV, S, D\)"):
        flash_attention(X, X[0], X[0], layout="BHSD")
    with pytest.raises(TPUKernelError, match=r"heads of q \(axis 1, layout='BHSD'\)"):
        flash_attention(X, X[:, :100], X[:, :100], layout="BHSD")
