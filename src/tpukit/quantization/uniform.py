"""Quantize a whole model in one format without calibration data, and the base of LoRA training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError
from ..hardware.stored_formats import WEIGHT_FORMATS, rounded_formats
from ..models.stored.calibration import find_matrices
from ..models.stored.parameter import with_stacks
from ..models.stored.parts import Part
from ..models.stored.running import Activations
from .files.model_files import load_quantized
from .integers import Method, quantize_integers
from .model import QuantizedModel, matrix_of, with_parts
from .plan import SKIP, Rules, make_plan
from .subject import Subject, as_batch, make_subject
from .vector_codes.codec import quantize_matrices


def round_matrix(
    weight: jax.Array,
    format: str,
    *,
    hessian: jax.Array | None,
    integers: Method | None = None,
    seed: int = 0,
    codec: dict[str, Any] | None = None,
) -> Part:
    """Quantize an (inputs, outputs) matrix in a format of a `QuantPlan`.

    Args:
        weight: The matrix.
        format: Its name; "bf16" rounds to bfloat16.
        hessian: XᵀX of its inputs, or None.
        integers: Rounding of integers; by default "gptq" for int4 with a hessian, else "nearest".
        seed: Seed of the codebooks.
        codec: Other arguments of `quantize_matrix`.
    """
    made = round_matrices(
        [weight], format, hessians=[hessian], integers=integers, seed=seed, codec=codec
    )
    return made[0]


def round_matrices(
    weights: Sequence[jax.Array],
    format: str,
    *,
    hessians: Sequence[jax.Array | None],
    integers: Method | None = None,
    seed: int = 0,
    codec: dict[str, Any] | None = None,
) -> list[Part]:
    """Quantize matrices of one shape in one format; see `round_matrix`."""
    if format == "bf16":
        return [weight.astype(jnp.bfloat16) for weight in weights]
    if format not in rounded_formats():
        made = quantize_matrices(weights, hessians, format=format, seed=seed, **(codec or {}))
        return [*made]
    stored = WEIGHT_FORMATS[format]
    parts: list[Part] = []
    for weight, hessian in zip(weights, hessians, strict=True):
        default: Method = "gptq" if stored.is_packed and hessian is not None else "nearest"
        method = integers or default
        if not stored.has_integers and method == "gptq":
            method = "nearest"
        parts.append(quantize_integers(weight, format, hessian=hessian, method=method))
    return parts


_OF_BITS = {8: "int8", 4: "int4", 16: "bf16"}

_WRONG_INPUTS = (TypeError, ValueError, AttributeError, IndexError)
"""What a model raises for inputs that it does not read."""


def quantize_for_tpu(
    model: object,
    bits: int = 8,
    *,
    params: PyTree = None,
    inputs: PyTree = None,
    format: Literal["int8", "int4", "fp8", "bf16"] | None = None,
    activations: Activations = "wide",
    rules: Rules = (),
) -> QuantizedModel:
    """Round a model's matrices to the nearest values of a format that TPUs multiply.

    It neither calibrates nor measures the loss; `quantize_model` does both.

    Args:
        model: See `quantize_model`.
        bits: 8 (int8), 4 (int4, one scale per 128 inputs) or 16 (bfloat16).
        params: The parameters, if the model does not contain them.
        inputs: A batch or its shapes; by default guessed from the widths of the model's matrices,
            or tokens for a reference transformer.
        format: Instead of bits; "fp8" is native on 7x only.
        activations: "int8" also rounds activations at run time.
        rules: See `make_plan`.

    Raises:
        TPUValidationError: No format has this number of bits.
        TPUModelError: Inputs cannot be guessed.
    """
    chosen = format or _OF_BITS.get(bits)
    if chosen is None:
        raise TPUValidationError(
            f"bits={bits}: TPUs multiply 8 (int8) and 4 (int4) bits, and 16 (bf16); for other "
            "sizes use quantize_model(model, data, format='vq2')."
        )
    subject, batch = _subject(model, params, inputs)
    matrices = find_matrices(subject.apply, subject.params, batch)
    plan = make_plan(matrices, chosen, rules=rules, skip_ends=False)
    parts: dict[str, Part] = {}
    for matrix in matrices.found:
        if plan.formats[matrix.name] != SKIP:
            weight = matrix_of(subject.params, matrix)
            parts[matrix.name] = round_matrix(weight, plan.formats[matrix.name], hessian=None)
    if not parts:
        raise TPUModelError(
            "the model has no matrix to quantize: those it multiplies are skipped ("
            + ", ".join(f"{name}: {why}" for name, why in list(plan.reasons.items())[:3])
            + "); name them in rules=[(pattern, format)]."
        )
    return QuantizedModel(with_parts(subject.params, matrices, parts), subject, activations)


def _subject(model: Any, params: PyTree, inputs: PyTree) -> tuple[Subject, Any]:
    if inputs is not None:
        subject = make_subject(model, params, inputs)
        return subject, subject.batch(inputs)
    for guess in _guesses(model, params):
        try:
            subject = make_subject(model, params, guess)
            batch = subject.batch(guess)
            jax.eval_shape(subject.apply, subject.params, batch)
        except _WRONG_INPUTS:
            continue
        except TPUModelError as error:  # the same, with the line of the user's file
            if not isinstance(error.__cause__, _WRONG_INPUTS):
                raise
        else:
            return subject, batch
    raise TPUModelError(
        "the inputs of the model cannot be guessed from its parameters; pass a batch: "
        "quantize_for_tpu(model, bits=8, inputs=…)."
    )


def _guesses(model: Any, params: PyTree) -> list[Any]:
    """Return candidate batches: tokens, and vectors of every width of the model's matrices."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    widths: dict[int, None] = {}
    probe = make_subject(model, params, as_batch(tokens))
    for leaf in jax.tree.leaves(probe.params):
        if leaf.ndim >= 2:
            widths |= dict.fromkeys((leaf.shape[-2], leaf.shape[-1]))
    vectors = [jnp.zeros((2, width), jnp.float32) for width in widths]
    return [tokens, *vectors] if probe.config is not None else [*vectors, tokens]


def rounded_base(
    model: Any, format: Any, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> Callable[[PyTree], PyTree]:
    """Return a function that rounds a model's matrices to the nearest values of a format.

    The function can be traced. Embeddings, norms and routers stay in full precision, as in
    `quantize_for_tpu`. Matrices of all layers are stacked; stacking them in every step for the scan
    over layers would keep them twice.

    Args:
        model: See `quantize_for_tpu`.
        format: "int8", "int4" or "fp8".
        batch: Shapes of a batch.
    """

    def keep(params: PyTree) -> PyTree:
        inputs = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in batch.items()}
        made = quantize_for_tpu(model, params=params, inputs=inputs, format=format)
        return with_stacks(made.params)

    return keep


def saved_base(folder: str) -> Callable[[PyTree], PyTree]:
    """Return a function that returns zeros in the structure of a quantized folder's parameters.

    It is for tracing shapes; `load_quantized` reads the values.
    """
    held = load_quantized(folder).params
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), held)
    return lambda _: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
