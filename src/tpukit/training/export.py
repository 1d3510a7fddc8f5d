"""Export of trained models: a Hugging Face folder, the files of a framework, or peft adapters.

A run of a user's own model keeps a record, `model.json`, from which the model is exported.
"""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.markup import escape
from rich.table import Table

from ..errors import TPUValidationError
from ..models.adapters.kind import TrainedArrays, code_of, nested, write_arrays
from ..models.adapters.registry import kind_of, known_kinds
from ..models.huggingface.config import read_generation_config, with_end_tokens
from ..models.huggingface.files import read_json
from ..models.huggingface.weights import export_huggingface
from ..models.lora.adapter import with_low_rank
from ..models.lora.peft_files import write_peft
from ..models.lora.spec import LoraSpec
from ..models.stored.parameter import is_stored
from ..models.stored.running import dense_parameters
from ..parallel.sharding.trees import join_path
from ..records.mirror import address_of
from ..runtime.files import finish_folder, folder_beside, new_folder, write_text
from ..shown import Shown
from ..step.host_memory import EXPORT_FILE_BYTES
from ..step.workload import Workload
from .checkpoint import TPUCheckpointer
from .data.tokenizer import TOKENIZER, keep_tokenizer, load_tokenizer, text_ends
from .run_directory import read_run
from .trained_model import (
    TrainedModel,
    checkpoints_of,
    existing_path,
    find_run,
    load_trained,
    read_saved,
    restore_saved,
)

MODEL_FILE = "model.json"
DEQUANTIZED = (
    "the source is quantized: its weights were dequantized to {dtype}, because transformers and "
    "other programs do not read its format. The export is as large as the unquantized model."
)


@dataclass(frozen=True, kw_only=True)
class Export(Shown):
    """The files that an export wrote.

    Attributes:
        source: The run or folder that was exported.
        step: The step of the checkpoint, if there is one.
        folder: Where the files are.
        files: The file names.
        size_bytes: Their size together.
        parameters: Number of parameters.
        framework: The framework that reads the files.
        needs: The user's code that makes a model of the files; None if none is needed.
        opened_by: Python code that opens the folder; None for Hugging Face folders.
        notes: Changes that the export made, such as dequantizing.
    """

    source: str
    step: int | None
    folder: str
    files: tuple[str, ...]
    size_bytes: int
    parameters: int
    framework: str = "Hugging Face"
    needs: str | None = None
    opened_by: str | None = None
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Table:
        table = Table(show_header=False, title=f"exported to {self.folder}")
        table.add_row("from", f"{self.source}, step {self.step}")
        table.add_row("parameters", f"{self.parameters:,}")
        table.add_row("files", ", ".join(self.files))
        table.add_row("size", f"{self.size_bytes / 1e6:,.1f} MB")
        table.add_row("framework", self.framework)
        if self.needs is not None:
            table.add_row("code it needs", escape(self.needs))
        if self.opened_by is not None:
            table.add_row("opened by", escape(self.opened_by))
        for note in self.notes:
            table.add_row("note", escape(note))
        return table


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """The facts about a user's own model that checkpoints do not contain.

    Attributes:
        framework: The kind of model, e.g. "flax nnx".
        code: Name of the model's class or function.
        file: The file of that code, if it has one.
        source: The model's name in its job, e.g. "torch:net.py:build"; None for a Python object.
        details: Values that the framework's files need beside arrays.
    """

    framework: str
    code: str
    file: str | None
    source: str | None
    details: Mapping[str, Any]

    @property
    def framework_name(self) -> str:
        """The framework's name, the same for a model and for a function that makes one."""
        return self.framework.removesuffix(" function")

    @property
    def needs(self) -> str:
        """The user's code that makes a model of the arrays."""
        where = "" if self.file is None else f" in {self.file}"
        built = "" if self.source is None else f", built by {self.source}"
        return f"{self.code}{where}{built}"

    def write(self, arrays: TrainedArrays, folder: Path) -> str:
        """Write arrays in the framework's files, and return the Python that opens them."""
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
    """Read the model record of a run.

    Raises:
        TPUValidationError: The record is missing or damaged.
    """
    file = run / MODEL_FILE
    try:
        return ModelRecord(**json.loads(file.read_text()))
    except FileNotFoundError:
        raise TPUValidationError(
            f"{run} trained a user's own model, but has no {MODEL_FILE}, which names its "
            "framework: an older tpukit wrote the run. Train it for one more step, or restore its "
            "parameters with TPUCheckpointer."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise TPUValidationError(
            f"{file} cannot be read ({error}); train the run for one more step to write it again."
        ) from None


def export_run(
    source: str | Path, folder: str | Path, *, step: int | None = None, adapters: bool = False
) -> Export:
    """Write a run's parameters, bit for bit, in the Hugging Face layout.

    A run of a user's own model is written in the files of its framework: the state_dict of a torch
    module as safetensors, a Hugging Face model as its folder, flax nnx as an Orbax checkpoint, flax
    linen as msgpack, equinox as its serialised leaves. A `README.md` names the code that the files
    need, and the Python that opens them.

    A LoRA run is written with its adapters added to the weights; or, with `adapters`, as the
    adapters alone, in the layout that `peft` reads.

    Parameters are read one at a time, so host memory for the largest one and for one file is
    enough for any model. The folder appears only when it is complete. The run's tokenizer is
    written as `tokenizer.json`, the byte tokenizer too.

    Args:
        source: See `load_trained`.
        folder: A folder that does not exist yet or is empty.
        step: The checkpoint to export; the newest good one by default.
        adapters: Write only the adapters of a run.

    Raises:
        TPUValidationError: The folder is not empty, or there is no model at `source`.
        TPUModelError: The model has a feature that no Hugging Face architecture has.
    """
    target = new_folder(folder)
    if adapters:
        return _export_adapters(source, target, step)
    run, own_step = find_run(existing_path(source))
    if run is not None and not isinstance(read_run(run)["identity"]["model"], dict):
        return _export_own(run, target, step if step is not None else own_step)
    with _opened(source, step) as model, folder_beside(target) as made:
        params = dense_parameters(model.params)
        export_huggingface(
            params,
            model.config,
            made,
            max_shard_bytes=EXPORT_FILE_BYTES,
            generation=_generation(model),
        )
        keep_tokenizer(model.tokenizer, made)
        for file in made.glob("*.safetensors"):  # they were private to their owner
            shutil.copymode(made / "config.json", file)
        finish_folder(made, target)
    notes = (DEQUANTIZED.format(dtype=model.config.dtype),) if _is_quantized(model) else ()
    count = model.config.parameter_count().total
    return replace(_written(target, model.source, model.step, count), notes=notes)


def _is_quantized(model: TrainedModel) -> bool:
    folder = Path(model.source)
    if any(is_stored(leaf) for leaf in jax.tree.leaves(model.params, is_leaf=is_stored)):
        return True
    file = folder / "config.json"
    return file.is_file() and "quantization_config" in read_json(file)


def _export_own(run: Path, target: Path, step: int | None) -> Export:
    """Write a user's own model in the files of its framework."""
    about, record = read_run(run), read_model_record(run)
    folder = about["settings"].get("checkpoint_dir") or checkpoints_of(run)
    with TPUCheckpointer(folder) as checkpointer, folder_beside(target) as made:
        saved = checkpointer.open(step)
        state: dict[str, Any] = {}
        if "model_state" in saved.items:
            state = dict(checkpointer.open(saved.step, item="model_state").arrays.named())
        arrays = TrainedArrays(dict(saved.arrays.named()), state)
        if (spec := about["identity"].get("lora")) is not None:
            arrays = _merged(arrays, LoraSpec.from_dict(spec))
        opened_by = record.write(arrays, made)
        keep_tokenizer(_run_tokenizer(run, about), made)
        (made / "README.md").write_text(_read_me(record, opened_by, address_of(run), saved.step))
        finish_folder(made, target)
    count = sum(int(np.prod(array.shape)) for array in arrays.params.values())
    return replace(
        _written(target, address_of(run), saved.step, count),
        framework=record.framework_name,
        needs=record.needs,
        opened_by=opened_by,
    )


def _merged(arrays: TrainedArrays, lora: LoraSpec) -> TrainedArrays:
    """Add LoRA matrices to the weights that they belong to."""
    state = nested(arrays.model_state)
    matrices = nested(arrays.params)
    params = with_low_rank(dense_parameters(state["base"]), matrices, lora)
    flat = {join_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    carried = {
        name.removeprefix("carried/"): array
        for name, array in arrays.model_state.items()
        if name.startswith("carried/")
    }
    return TrainedArrays(flat, carried)


def _run_tokenizer(run: Path, about: Mapping[str, Any]) -> str | None:
    kept = run / TOKENIZER
    return str(kept) if kept.is_file() else about["settings"].get("tokenizer")


def _read_me(record: ModelRecord, opened_by: str, run: str, step: int) -> str:
    return (
        f"# {record.code}\n\n"
        f"A {record.framework_name} model, from step {step} of the run {run}.\n\n"
        f"The code it needs: {record.needs}.\n\n"
        f"With `model` as that code builds it, and `folder` as the path of this folder:\n\n"
        f"```python\n{opened_by}\n```\n"
    )


def _generation(model: TrainedModel) -> dict[str, Any]:
    """Return generation settings with which `transformers` ends texts as `tpukit generate` does."""
    if model.tokenizer is None:
        return dict(model.generation)
    ends = text_ends(load_tokenizer(model.tokenizer), model.generation)
    return with_end_tokens(model.generation, (n for n in ends if n < model.config.vocab_size))


def _export_adapters(source: str | Path, target: Path, step: int | None) -> Export:
    run, own_step = find_run(existing_path(source))
    about = None if run is None else read_saved(run)
    if run is None or about is None or about.lora is None:
        raise TPUValidationError(
            f"{source} trained no adapters; leave --adapters out to export the model."
        )
    saved = restore_saved(run, step if step is not None else own_step)
    base = read_run(run)["settings"].get("init_from")
    with folder_beside(target) as made:
        write_peft(saved.params, about.lora, about.config, made, base=base)
        finish_folder(made, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(saved.params))
    return _written(target, address_of(run), saved.step, count)


def _written(target: Path, source: str, step: int | None, parameters: int) -> Export:
    files = sorted(target.iterdir())
    return Export(
        source=source,
        step=step,
        folder=str(target),
        files=tuple(file.name for file in files),
        size_bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        parameters=parameters,
    )


@contextmanager
def _opened(source: str | Path, step: int | None) -> Generator[TrainedModel]:
    """Open the model at `source`; a run's parameters are read one by one, on access."""
    run, own_step = find_run(existing_path(source))
    if run is None or read_saved(run).lora is not None:
        # Adding LoRA matrices needs the weights in memory.
        yield load_trained(source, step=step)
        return
    config, folder, tokenizer, _ = read_saved(run)
    with TPUCheckpointer(folder) as checkpointer:
        saved = checkpointer.open(step if step is not None else own_step)
        yield TrainedModel(
            config=config,
            params=saved.arrays,
            source=address_of(run),
            step=saved.step,
            tokenizer=tokenizer,
            generation=read_generation_config(run),
        )
