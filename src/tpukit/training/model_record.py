"""A run's record of a model of the user's own, from which the model is exported."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import TPUValidationError
from ..models.adapters.own_files import TrainedArrays, code_of, write_arrays
from ..models.adapters.registry import kind_of, known_kinds
from ..runtime.files import write_text
from ..step.workload import Workload

MODEL_FILE = "model.json"


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """What a run's checkpoints do not say about its model.

    Attributes:
        framework: The kind of model, e.g. "flax nnx".
        code: Name of the class or function that the model is written in.
        file: The file of that code, if it has one.
        source: The model's name in its job, e.g. "torch:net.py:build"; None for an object that was
            given in Python.
        details: What the framework's own files need beside arrays.
    """

    framework: str
    code: str
    file: str | None
    source: str | None
    details: Mapping[str, Any]

    @property
    def framework_name(self) -> str:
        """The framework's name, whether a model was given or a function that makes one."""
        return self.framework.removesuffix(" function")

    @property
    def needs(self) -> str:
        """The code without which the files are arrays and no model."""
        where = "" if self.file is None else f" in {self.file}"
        built = "" if self.source is None else f", built by {self.source}"
        return f"{self.code}{where}{built}"

    def write(self, arrays: TrainedArrays, folder: Path) -> str:
        """Write arrays in the framework's own files, and return the Python that opens them."""
        kinds = {kind.name: kind for kind in known_kinds()}
        write = kinds[self.framework].write if self.framework in kinds else write_arrays
        return write(self.details, arrays, folder)


def record_model(work: Workload, source: str | None, run: Path) -> None:
    """Write the record of a user's own model into a run directory."""
    if work.config is not None:
        return
    kind, code = kind_of(work.model), code_of(work.model)
    record = ModelRecord(
        framework=kind.name,
        code=str(code["name"]),
        file=code["file"],
        source=source,
        details={} if kind.describe is None else kind.describe(work.model),
    )
    write_text(run / MODEL_FILE, json.dumps(asdict(record), indent=1) + "\n")


def read_model_record(run: Path) -> ModelRecord:
    """Read the record of a run.

    Raises:
        TPUValidationError: The run has none, or it is damaged.
    """
    file = run / MODEL_FILE
    try:
        return ModelRecord(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise TPUValidationError(
            f"{run} trained a model of the user's own, and {MODEL_FILE}, which says in which "
            "framework, is not there: the run is of an older tpukit. Take one more step of it, or "
            "restore its parameters with TPUCheckpointer."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise TPUValidationError(
            f"{file} cannot be read ({error}); take one more step of the run to write it again."
        ) from None
