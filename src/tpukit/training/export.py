"""A trained model written for others: a Hugging Face folder, its framework's files, or adapters."""

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
from ..models.adapters.own_files import TrainedArrays, nested
from ..models.huggingface.files import read_json
from ..models.huggingface.generation_config import read_generation_config, with_end_tokens
from ..models.huggingface.weights import export_huggingface
from ..models.lora.adapter import with_low_rank
from ..models.lora.peft_files import write_peft
from ..models.lora.spec import LoraSpec
from ..models.stored.parameter import is_stored
from ..models.stored.running import dense_parameters
from ..parallel.sharding.trees import join_path
from ..runtime.files import finish_folder, folder_beside, new_folder
from ..shown import Shown
from ..step.host_memory import EXPORT_FILE_BYTES
from .checkpoint import TPUCheckpointer
from .data.tokenizer import load_tokenizer
from .data.tokenizer_files import TOKENIZER, keep_tokenizer, text_ends
from .model_record import ModelRecord, read_model_record
from .run_directory import read_run
from .saved_run import existing_path, find_run, read_saved, restore_saved
from .trained_model import TrainedModel, load_trained

WIDENED = (
    "the source is quantized: its weights were widened to {dtype}, because transformers and other "
    "programs do not read its format. The export is as large as the model was before."
)


@dataclass(frozen=True, kw_only=True)
class Export(Shown):
    """What was written where.

    Attributes:
        source: The run or folder that was exported.
        step: The step of the checkpoint, if there is one.
        folder: Where the files are.
        files: Their names.
        size_bytes: Their size.
        parameters: How many numbers the model has.
        framework: Whose files they are.
        needs: The user's code that makes a model of the files; None if none is needed.
        opened_by: Python that opens the folder; None for Hugging Face folders.
        notes: What was changed on the way.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "files": list(self.files), "notes": list(self.notes)}

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


def export_run(
    source: str | Path, folder: str | Path, *, step: int | None = None, adapters: bool = False
) -> Export:
    """Write a run's parameters in the Hugging Face layout, as they are, bit for bit.

    A run of a user's own model is written in the files of its framework: the state_dict of a torch
    module as safetensors, a Hugging Face model as its folder, flax nnx as an Orbax checkpoint, flax
    linen as msgpack, equinox as its serialised leaves. `README.md` beside them names the code that
    the files need, and the Python that opens them.

    Of a run that trained adapters (LoRA), the sum of them and the model's own is written; or with
    `adapters` they alone, in the layout that `peft` reads.

    They are read one at a time: host memory for the largest one and for one file is enough,
    whatever the size of the model. The folder appears only when it is complete. The tokenizer that
    the run used goes along as a `tokenizer.json`, bytes too.

    Args:
        source: See `load_trained`.
        folder: Must not be there, or be empty.
        step: Which checkpoint; the newest good one by default.
        adapters: Write the adapters of a run, and no other parameters.

    Raises:
        TPUValidationError: The folder holds files already, or there is no model at `source`.
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
        for file in made.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(made / "config.json", file)
        finish_folder(made, target)
    notes = (WIDENED.format(dtype=model.config.dtype),) if _is_quantized(model) else ()
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
    folder = about["settings"].get("checkpoint_dir") or run / "checkpoints"
    with TPUCheckpointer(folder) as checkpointer, folder_beside(target) as made:
        found = checkpointer.open(step)
        state: dict[str, Any] = {}
        if "model_state" in found.items:
            state = dict(checkpointer.open(found.step, item="model_state").arrays.named())
        arrays = TrainedArrays(dict(found.arrays.named()), state)
        if (thin := about["identity"].get("lora")) is not None:
            arrays = _merged(arrays, LoraSpec.from_dict(thin))
        opened_by = record.write(arrays, made)
        keep_tokenizer(_words_of(run, about), made)
        (made / "README.md").write_text(_read_me(record, opened_by, run, found.step))
        finish_folder(made, target)
    count = sum(int(np.prod(array.shape)) for array in arrays.params.values())
    return replace(
        _written(target, str(run), found.step, count),
        framework=record.framework_name,
        needs=record.needs,
        opened_by=opened_by,
    )


def _merged(arrays: TrainedArrays, lora: LoraSpec) -> TrainedArrays:
    """Add thin matrices to the parameters that they are beside."""
    state = nested(arrays.model_state)
    thin = nested(arrays.params)
    params = with_low_rank(dense_parameters(state["base"]), thin, lora)
    flat = {join_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    carried = {
        name.removeprefix("carried/"): array
        for name, array in arrays.model_state.items()
        if name.startswith("carried/")
    }
    return TrainedArrays(flat, carried)


def _words_of(run: Path, about: Mapping[str, Any]) -> str | None:
    kept = run / TOKENIZER
    return str(kept) if kept.is_file() else about["settings"].get("tokenizer")


def _read_me(record: ModelRecord, opened_by: str, run: Path, step: int) -> str:
    return (
        f"# {record.code}\n\n"
        f"A {record.framework_name} model, from step {step} of the run {run}.\n\n"
        f"The code it needs: {record.needs}.\n\n"
        f"With `model` as that code builds it, and `folder` as the path of this folder:\n\n"
        f"```python\n{opened_by}\n```\n"
    )


def _generation(model: TrainedModel) -> dict[str, Any]:
    """Return what `transformers` has to know to end texts where `tpukit generate` ends them."""
    if model.tokenizer is None:
        return dict(model.generation)
    ends = text_ends(load_tokenizer(model.tokenizer), model.generation)
    return with_end_tokens(model.generation, (n for n in ends if n < model.config.vocab_size))


def _export_adapters(source: str | Path, target: Path, step: int | None) -> Export:
    run, own_step = find_run(existing_path(source))
    about = None if run is None else read_saved(run)
    if run is None or about is None or about.lora is None:
        raise TPUValidationError(
            f"{source} trained no adapters; leave --adapters out, and the whole model is written."
        )
    found = restore_saved(run, step if step is not None else own_step)
    base = read_run(run)["settings"].get("init_from")
    with folder_beside(target) as made:
        write_peft(found.params, about.lora, about.config, made, base=base)
        finish_folder(made, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    return _written(target, str(run), found.step, count)


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
    """The model at `source`; the parameters of a run are read one by one when asked for."""
    run, own_step = find_run(existing_path(source))
    if run is None or read_saved(run).lora is not None:  # thin matrices are added to whole ones
        yield load_trained(source, step=step)
        return
    config, folder, tokenizer, _ = read_saved(run)
    with TPUCheckpointer(folder) as checkpointer:
        found = checkpointer.open(step if step is not None else own_step)
        yield TrainedModel(
            config=config,
            params=found.arrays,
            source=str(run),
            step=found.step,
            tokenizer=tokenizer,
            generation=read_generation_config(run),
        )
