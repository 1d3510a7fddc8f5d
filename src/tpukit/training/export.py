"""A trained model written for others: whole, as Hugging Face has it, or its adapters alone."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from ..errors import TPUValidationError
from ..models.huggingface.generation_config import read_generation_config, with_end_tokens
from ..models.huggingface.weights import export_huggingface
from ..models.lora.peft_files import write_peft
from ..models.stored.running import dense_parameters
from ..runtime.files import finish_folder, folder_beside, new_folder
from ..step.host_memory import EXPORT_FILE_BYTES
from .checkpoint import TPUCheckpointer
from .data.tokenizer import load_tokenizer
from .data.tokenizer_files import keep_tokenizer, text_ends
from .run_directory import read_run
from .saved_run import existing_path, find_run, read_saved, restore_saved
from .trained_model import TrainedModel, load_trained


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written where."""

    source: str
    step: int | None
    folder: str
    files: tuple[str, ...]
    size_bytes: int
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "files": list(self.files)}

    def __rich__(self) -> Table:
        table = Table(show_header=False, title=f"exported to {self.folder}")
        table.add_row("from", f"{self.source}, step {self.step}")
        table.add_row("parameters", f"{self.parameters:,}")
        table.add_row("files", ", ".join(self.files))
        table.add_row("size", f"{self.size_bytes / 1e6:,.1f} MB")
        return table


def export_run(
    source: str | Path, folder: str | Path, *, step: int | None = None, adapters: bool = False
) -> Export:
    """Write a run's parameters in the Hugging Face layout, as they are, bit for bit.

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
    return _written(target, model.source, model.step, model.config.parameter_count().total)


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
        size_bytes=sum(file.stat().st_size for file in files),
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
