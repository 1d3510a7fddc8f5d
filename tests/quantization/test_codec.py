"""`quantize_matrix` and `VQArray` beside float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vq_arrays import made_up

from tpukit.errors import TPUKernelError, TPUValidationError
from tpukit.hardware.target import target_chip
from tpukit.quantization import VQArray, VQFormat, output_error, parse_vq_format, quantize_matrix
from tpukit.quantization.vector_codes.vq_array import random_signs, rotate, rotate_back

SMALL = VQFormat(length=2, entries=16)


def layer(height=48, width=40, seed=0):
    """A weight with heavy tails, and XᵀX of correlated inputs of uneven size."""
    random = np.random.default_rng(seed)
    weight = random.standard_t(5, (height, width))
    inputs = random.standard_normal((400, 8)) @ random.standard_normal((8, height))
    inputs += 0.5 * random.standard_normal((400, height))
    inputs *= np.exp(random.normal(0, 1, height))
    return weight, inputs.T @ inputs


def decoded(array: VQArray) -> np.ndarray:
    """What codes, entries and scales say, in float64, value by value."""
    length = array.entries.shape[2]
    found = np.zeros(array.shape)
    for stage, codes in enumerate(np.asarray(array.codes, int)):
        for row in range(array.shape[0]):
            entries = np.asarray(array.entries, np.float64)[stage, codes[row // length]]
            found[row] += entries[:, row % length]
    return found * np.asarray(array.scales, np.float64)


def true_error(weight, made, hessian):
    lost = weight - np.asarray(made, np.float64)
    return np.einsum("io,ij,jo", lost, hessian, lost) / np.einsum(
        "io,ij,jo", weight, hessian, weight
    )


@pytest.fixture(scope="module")
def ladder():
    weight, hessian = layer()
    rungs = (
        {"feedback": False, "refit": False},
        {"hessian": hessian, "feedback": False, "refit": False},
        {"hessian": hessian, "refit": False},
        {"hessian": hessian},
    )
    return weight, hessian, [quantize_matrix(weight, format=SMALL, **rung) for rung in rungs]


def test_each_rung_lowers_the_output_error(ladder):
    weight, hessian, rungs = ladder
    errors = [true_error(weight, one.dequantize(), hessian) for one in rungs]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 3


def test_output_error_is_what_float64_says(ladder):
    weight, hessian, rungs = ladder
    found = output_error(weight, rungs[-1], hessian)
    assert found == pytest.approx(true_error(weight, rungs[-1].dequantize(), hessian), rel=1e-3)
    assert output_error(weight, jnp.zeros_like(weight), hessian) == pytest.approx(1)
    assert output_error(weight, jnp.asarray(weight)) == 0


def test_it_decodes_what_codes_say(ladder):
    for one in ladder[2]:
        np.testing.assert_allclose(one.dequantize(), decoded(one), rtol=1e-6)


@pytest.mark.parametrize("name", ["vq1.75", "vq4", "vq:1x300x3"])
def test_products_are_those_of_the_decoded_matrix(name):
    array = made_up(name, (130, 24))
    np.testing.assert_allclose(array.dequantize(), decoded(array), rtol=1e-6)
    x = np.random.default_rng(1).standard_normal((2, 5, 130)).astype(np.float32)
    expected = x.astype(np.float64) @ decoded(array)
    # The kernel's products are of bfloat16 values.
    slack = 0.03 * np.abs(expected).max()
    np.testing.assert_allclose(jnp.asarray(x) @ array, expected, atol=slack)
    np.testing.assert_allclose(x @ array, expected, atol=slack)
    np.testing.assert_allclose(jax.jit(lambda x, w: x @ w)(x, array), expected, atol=slack)
    np.testing.assert_allclose(array @ jnp.eye(24), decoded(array), rtol=1e-5, atol=1e-6)


def test_a_gradient_goes_through_to_the_inputs():
    array = made_up("vq1.75", (16, 8))
    found = jax.grad(lambda x: (x @ array).sum())(jnp.ones((1, 16)))
    expected = decoded(array).sum(1)
    np.testing.assert_allclose(found[0], expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.slow
def test_a_rotation_is_undone():
    weight, hessian = layer()
    array = quantize_matrix(weight, format=SMALL, hessian=hessian, hadamard=True, refit=False)
    assert true_error(weight, array.dequantize(), hessian) < 0.2
    x = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    np.testing.assert_allclose(x @ array, x @ np.asarray(array.dequantize()), atol=1e-3)


@pytest.mark.parametrize("width", [8, 24, 96, 128])
def test_the_rotation_is_orthogonal(width):
    signs = random_signs(width, 3)
    matrix = np.asarray(rotate(jnp.eye(width), signs), np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)
    back = rotate_back(rotate(jnp.eye(width), signs), signs)
    np.testing.assert_allclose(back, np.eye(width), atol=1e-5)


@pytest.mark.slow
def test_two_stages_lose_less_than_one():
    weight, hessian = layer()
    one, two = (
        quantize_matrix(
            weight, format=VQFormat(length=2, entries=16, stages=count), hessian=hessian
        )
        for count in (1, 2)
    )
    assert output_error(weight, two, hessian) < output_error(weight, one, hessian) / 4


def test_sizes_are_counted_with_everything():
    array = made_up("vq:1x16x2", (48, 40))
    assert array.nbytes == 24 * 40 + 16 * 2 + 2 * 40
    assert array.bits_per_weight == pytest.approx(8 * array.nbytes / (48 * 40))
    assert array.to_dict()["format"] == "vq:1x16x2"
    assert "48×40" in array.__rich__()


def test_odd_matrices_work():
    zeros = quantize_matrix(np.zeros((8, 4)), format=SMALL)
    assert np.array_equal(zeros.dequantize(), np.zeros((8, 4)))
    tiny = np.array([[1.0], [2.0], [3.0]])
    made = quantize_matrix(tiny, format=SMALL, feedback=False, refit=False)
    assert output_error(tiny, made) < 0.01


def test_a_stack_is_scanned():
    arrays = [made_up("vq:1x16x2", (16, 16)), made_up("vq:1x16x2", (16, 16))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    x = jnp.ones((2, 16))
    found = jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]
    np.testing.assert_allclose(found, x @ arrays[0] @ arrays[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight": np.ones(4)}, "expected \\(in, out\\)"),
        ({"weight": np.full((4, 4), np.inf)}, "not finite"),
        ({"hessian": np.eye(3)}, "Hessian is \\(3, 3\\)"),
        ({"hessian": np.zeros((4, 4))}, "no input reached"),
        ({"format": "vq5"}, "no vector format"),
        ({"format": 5}, "5 bits per weight; expected one of 1.75, 2, 3.5, 4"),
        ({"hadamard": True}, "multiple of 8"),
        ({"metric": "cosine"}, "forced=True"),
    ],
)
def test_what_cannot_be_is_said(changed, said):
    kept = {"weight": np.ones((4, 4)), "format": "vq2"} | changed
    with pytest.raises(TPUValidationError, match=said):
        quantize_matrix(kept.pop("weight"), **kept)


def test_another_metric_can_be_forced():
    weight = layer()[0]
    kept = {"format": SMALL, "feedback": False, "refit": False}
    forced = quantize_matrix(weight, metric="dot_product", forced=True, **kept)
    plain = quantize_matrix(weight, **kept)
    assert output_error(weight, plain) < output_error(weight, forced) < 1


def test_a_wrong_width_is_said():
    array = made_up("vq2", (16, 8))
    with pytest.raises(TPUKernelError, match="must have 16 elements"):
        jnp.ones((2, 15)) @ array


def test_names_of_formats_are_read_back():
    for spelling in ("vq1.75", "vq2", "vq3.5", "vq4", "trellis2", "vq:3x64x8", "trellis3:256"):
        assert parse_vq_format(spelling).name == spelling
    assert parse_vq_format(3.5).name == "vq3.5"
    assert parse_vq_format("vq:1x1024x512").bits == pytest.approx(10 / 512)
    with pytest.raises(TPUValidationError, match="Did you mean 'vq2'"):
        parse_vq_format("v2")
    with pytest.raises(TPUValidationError, match="4\\^bits"):
        parse_vq_format("trellis4:64")


@pytest.mark.parametrize(("name", "fused"), [("vq2", True), ("vq3.5", True), ("vq:1x16x2", False)])
def test_the_fused_kernel_multiplies_on_a_tpu(name, fused):
    array = made_up(name, (256, 256))
    with target_chip("v5e"):
        traced = jax.jit(lambda x, w: x @ w).trace(jnp.ones((16, 256), jnp.bfloat16), array)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == fused
