"""`Calibrated`: a model with its matrices and calibration data, which plans are quantized from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ...annotations import PyTree
from ...errors import TPUModelError
from ...kernels.ops.quantized_matmul.weight import array_bytes
from ...models.stored.calibration import (
    InputStatistics,
    ModelMatrices,
    ModelMatrix,
    collect_statistics,
    find_matrices,
)
from ...models.stored.parts import Part, part_matrix
from ...models.stored.placement import Spread, place_part
from ...runtime.progress import Progress
from ..integers import Method
from ..measures.evaluation import QuantizationEvaluator
from ..model import matrix_of, parameter_of, replaced
from ..plan import SKIP, QuantPlan
from ..subject import Subject
from ..uniform import round_matrices
from ..vector_codes.codec import output_error


@dataclass(frozen=True, eq=False)
class RoundingMethod:
    """Options of rounding that hold for every format.

    Attributes:
        integers: See `round_matrix`.
        seed: Seed of the codebooks.
        sequential: Number of blocks of matrices. Inputs of a block are measured with all earlier
            blocks quantized; 1 measures all inputs on the full model.
        codec: Other arguments of `quantize_matrix`.
    """

    integers: Method | None = None
    seed: int = 0
    sequential: int = 4
    codec: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A model, its matrices, calibration data, and held-out data.

    Attributes:
        spread: Devices that share the measurements; None for the device of the parameters.
    """

    subject: Subject
    matrices: ModelMatrices
    batches: Sequence[PyTree]
    evaluator: QuantizationEvaluator
    evaluation_batches: Sequence[PyTree]
    rounding: RoundingMethod
    progress: Progress
    spread: Spread | None = None

    @classmethod
    def of(
        cls,
        subject: Subject,
        batches: Sequence[PyTree],
        evaluation: Sequence[PyTree],
        rounding: RoundingMethod,
        progress: Progress,
        mesh: Mesh | None = None,
    ) -> "Calibrated":
        """Find the matrices, and run the full model on the held-out data.

        Raises:
            TPUModelError: The model has no matmul with a parameter.
            MeshError: Nothing is sharded along an axis of the mesh.
            TPUValidationError: The devices of the mesh cannot share a batch.
        """
        matrices = find_matrices(subject.apply, subject.params, batches[0])
        if not matrices.found:
            why = "; ".join(f"{path}: {reason}" for path, reason in matrices.refused.items())
            raise TPUModelError(
                f"the model has no matmul with a whole parameter, so there is nothing to "
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
        return {matrix.name: matrix for matrix in self.matrices.found}

    def statistics(
        self, names: Iterable[str], parts: dict[str, Part] | None = None
    ) -> dict[str, InputStatistics]:
        """Return XᵀX of the inputs of some matrices, with `parts` as other matrices."""
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
        """Quantize every matrix of a plan, block by block.

        Inputs of a block are measured with all earlier blocks quantized. Matrices of one format and
        shape in a block are quantized together.
        """
        names = [name for name in plan.formats if plan.formats[name] != SKIP]
        made: dict[str, Stored] = {}
        for block in _blocks(names, self.rounding.sequential):
            statistics = self.statistics(
                block, {name: stored.part for name, stored in made.items()}
            )
            for format, some in self.alike(block, plan.formats).items():
                made |= self.store(some, format[0], statistics)
                self.progress(f"{format[0]} {len(made)} of {len(names)}: {', '.join(some)}")
        return {name: made[name] for name in names}

    def alike(
        self, names: Iterable[str], formats: Mapping[str, str]
    ) -> dict[tuple[str, tuple[int, int]], list[str]]:
        """Group names by format and shape; one program quantizes a group."""
        groups: dict[tuple[str, tuple[int, int]], list[str]] = {}
        for name in names:
            groups.setdefault((formats[name], self.by_name[name].shape), []).append(name)
        return groups

    def store(
        self, names: Sequence[str], format: str, statistics: Mapping[str, InputStatistics]
    ) -> dict[str, "Stored"]:
        """Quantize matrices of one shape in one format, fitted to calibration inputs."""
        rounding = self.rounding
        weights = [matrix_of(self.subject.params, self.by_name[name]) for name in names]
        hessians = [statistics[name].hessian for name in names]
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
        """Return a part with the sharding of its parameter."""
        matrix = self.by_name[name]
        parameter = parameter_of(self.subject.params, matrix)
        return place_part(part, matrix.axes, getattr(parameter, "sharding", None))


@dataclass(frozen=True)
class Stored:
    """One matrix in one format.

    Attributes:
        format: Its name.
        part: The stored matrix.
        error: The relative error of its output, tr(ΔᵀHΔ) / tr(WᵀHW), on the calibration inputs.
    """

    format: str
    part: Part
    error: float

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return array_bytes(self.part)


def _blocks(names: Sequence[str], count: int) -> list[Sequence[str]]:
    size = -(-len(names) // max(1, count)) or 1
    return [names[start : start + size] for start in range(0, len(names), size)]


def rows_of(batches: Sequence[PyTree]) -> int:
    """Return the number of rows in batches."""
    return sum(jax.tree.leaves(batch)[0].shape[0] for batch in batches)
