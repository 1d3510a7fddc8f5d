"""`quantize_for_tpu`: a whole model in one format, with no data at all."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError
from ..models.stored.calibration import find_matrices
from ..models.stored.part import Part
from ..models.stored.running import Activations
from .model import QuantizedModel, matrix_of, with_parts
from .plan import SKIP, Rules, make_plan
from .rounding import round_matrix
from .subject import Subject, as_batch, make_subject

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

    There is no calibration and no measure of what is lost; `quantize_model` has both.

    Args:
        model: See `quantize_model`.
        bits: 8 (int8), 4 (int4, a scale for every 128 inputs) or 16 (bfloat16).
        params: The parameters, where the model does not hold them.
        inputs: A batch, or one's shapes; where it is left out, the batch is guessed from the
            model's first matrix (a model of vectors), or is tokens (a reference transformer).
        format: In place of bits; "fp8" is native on 7x only.
        activations: "int8" also rounds what multiplies a quantized matrix, as it comes.
        rules: See `make_plan`.

    Raises:
        TPUValidationError: No format has so many bits.
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
    for one in matrices.found:
        if plan.formats[one.name] != SKIP:
            weight = matrix_of(subject.params, one)
            parts[one.name] = round_matrix(weight, plan.formats[one.name], hessian=None)
    if not parts:
        raise TPUModelError(
            "the model has no matrix to quantize: those it multiplies are skipped ("
            + ", ".join(f"{name}: {why}" for name, why in list(plan.reasons.items())[:3])
            + "); name them in rules=[(pattern, format)]."
        )
    return QuantizedModel(with_parts(subject.params, matrices, parts), subject, activations)


def _subject(model: Any, params: PyTree, inputs: Any) -> tuple[Subject, Any]:
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
        "what the model is called with cannot be guessed from its parameters; pass a batch: "
        "quantize_for_tpu(model, bits=8, inputs=…)."
    )


def _guesses(model: Any, params: PyTree) -> list[Any]:
    """Tokens, and vectors of every width that a matrix of the model has."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    widths: dict[int, None] = {}
    probe = make_subject(model, params, as_batch(tokens))
    for leaf in jax.tree.leaves(probe.params):
        if leaf.ndim >= 2:
            widths |= dict.fromkeys((leaf.shape[-2], leaf.shape[-1]))
    vectors = [jnp.zeros((2, width), jnp.float32) for width in widths]
    return [tokens, *vectors] if probe.config is not None else [*vectors, tokens]
