"""A model whose inputs were measured: what every way of quantizing it starts from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ...errors import TPUModelError
from ...kernels.ops.quantized_matmul.weight import array_bytes
from ...models.stored.calibration import (
    InputStatistics,
    ModelMatrices,
    ModelMatrix,
    collect_statistics,
    find_matrices,
)
from ...models.stored.part import Part, part_matrix
from ...models.stored.placement import place_part
from ...models.stored.spread import Spread
from ...runtime.progress import Progress
from ..integers.qwix_matrices import Method
from ..measures.evaluation import QuantizationEvaluator
from ..model import matrix_of, parameter_of, replaced
from ..plan import SKIP, QuantPlan
from ..rounding import round_matrices
from ..subject import Subject
from ..vector_codes.codec import output_error


@dataclass(frozen=True, eq=False)
class RoundingMethod:
    """How matrices are quantized, whatever their format.

    Attributes:
        integers: See `round_matrix`.
        seed: Of codebooks.
        sequential: In how many blocks a model is quantized, the inputs of each measured with those
            before it quantized; 1 measures all of them on the full model.
        codec: Further arguments of `quantize_matrix`.
    """

    integers: Method | None = None
    seed: int = 0
    sequential: int = 4
    codec: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A model, its matrices, data to measure inputs on, and data to judge by.

    Attributes:
        spread: Devices that share what is measured; None for the one where the parameters are.
    """

    subject: Subject
    matrices: ModelMatrices
    batches: Sequence[Any]
    evaluator: QuantizationEvaluator
    evaluation_batches: Sequence[Any]
    rounding: RoundingMethod
    progress: Progress
    spread: Spread | None = None

    @classmethod
    def of(
        cls,
        subject: Subject,
        batches: Sequence[Any],
        evaluation: Sequence[Any],
        rounding: RoundingMethod,
        progress: Progress,
        mesh: Mesh | None = None,
    ) -> "Calibrated":
        """Find the matrices and run the full model on the data it is judged by.

        Raises:
            TPUModelError: No parameter is multiplied with anything.
            MeshError: Nothing is split along an axis of the mesh.
            TPUValidationError: The devices of the mesh cannot share a batch.
        """
        matrices = find_matrices(subject.apply, subject.params, batches[0])
        if not matrices.found:
            why = "; ".join(f"{path}: {reason}" for path, reason in matrices.refused.items())
            raise TPUModelError(
                f"the model multiplies nothing with a whole parameter, so there is nothing to "
                f"quantize{f' ({why})' if why else ''}."
            )
        spread: Spread | None = None
        if mesh is not None:
            spread = Spread.of(mesh, subject.adapter, subject.params, batches[0])
            subject = replace(subject, params=spread.params(subject.params))
        evaluator = QuantizationEvaluator(subject.apply, subject.params, evaluation, spread)
        return cls(subject, matrices, batches, evaluator, evaluation, rounding, progress, spread)

    @property
    def by_name(self) -> dict[str, ModelMatrix]:
        """Matrices by name."""
        return {one.name: one for one in self.matrices.found}

    def statistics(
        self, names: Iterable[str], parts: dict[str, Part] | None = None
    ) -> dict[str, InputStatistics]:
        """XᵀX of the inputs of some matrices, with `parts` in place of others."""
        params = self.subject.params
        if parts:
            params = replaced(params, self.matrices, parts)
        return collect_statistics(
            self.subject.apply,
            params,
            self.batches,
            self.matrices,
            only=names,
            spread=self.spread,
        )

    def quantize(self, plan: QuantPlan) -> dict[str, "Stored"]:
        """Every matrix of a plan, block by block: a block's inputs are measured with those before.

        Matrices of one format and shape in a block are quantized together.
        """
        names = [name for name in plan.formats if plan.formats[name] != SKIP]
        made: dict[str, Stored] = {}
        for block in _blocks(names, self.rounding.sequential):
            seen = self.statistics(block, {name: one.part for name, one in made.items()})
            for format, some in self.alike(block, plan.formats).items():
                made |= self.store(some, format[0], seen)
                self.progress(f"{format[0]} {len(made)} of {len(names)}: {', '.join(some)}")
        return {name: made[name] for name in names}

    def alike(
        self, names: Iterable[str], formats: Mapping[str, str]
    ) -> dict[tuple[str, tuple[int, int]], list[str]]:
        """Names by format and shape: what one program quantizes."""
        found: dict[tuple[str, tuple[int, int]], list[str]] = {}
        for name in names:
            found.setdefault((formats[name], self.by_name[name].shape), []).append(name)
        return found

    def store(
        self, names: Sequence[str], format: str, seen: Mapping[str, InputStatistics]
    ) -> dict[str, "Stored"]:
        """Matrices of one shape in one format, fitted to the inputs that were seen."""
        rounding = self.rounding
        weights = [matrix_of(self.subject.params, self.by_name[name]) for name in names]
        hessians = [seen[name].hessian for name in names]
        parts = round_matrices(
            weights,
            format,
            hessians=hessians,
            integers=rounding.integers,
            seed=rounding.seed,
            codec=None if rounding.codec is None else dict(rounding.codec),
        )
        rows = zip(names, weights, parts, hessians, strict=True)
        return {
            name: Stored(
                format, self._placed(name, part), output_error(weight, part_matrix(part), hessian)
            )
            for name, weight, part, hessian in rows
        }

    def _placed(self, name: str, part: Part) -> Part:
        """A part where its parameter lies."""
        matrix = self.by_name[name]
        found = parameter_of(self.subject.params, matrix)
        return place_part(part, matrix.axes, getattr(found, "sharding", None))


@dataclass(frozen=True)
class Stored:
    """One matrix in one format.

    Attributes:
        format: Its name.
        part: What is kept.
        error: The relative error of its output, tr(ΔᵀHΔ) / tr(WᵀHW), for the inputs it was fitted
            to.
    """

    format: str
    part: Part
    error: float

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return array_bytes(self.part)


def _blocks(names: Sequence[str], count: int) -> list[Sequence[str]]:
    size = -(-len(names) // max(1, count)) or 1
    return [names[start : start + size] for start in range(0, len(names), size)]


def rows_of(batches: Sequence[Any]) -> int:
    """Rows of data in some batches."""
    return sum(jax.tree.leaves(batch)[0].shape[0] for batch in batches)
