"""A run's checkpoint as safetensors that Hugging Face and everything built on it read."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import TPUValidationError
from ..models.huggingface.weights import export_huggingface
from ..runtime.files import finish_folder, folder_beside
from .trained_model import load_trained


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


def export_run(source: str | Path, folder: str | Path, *, step: int | None = None) -> Export:
    """Write a run's parameters in the Hugging Face layout, as they are, bit for bit.

    The folder appears only when it is complete. A `tokenizer.json` that the run used goes along.

    Args:
        source: See `load_trained`.
        folder: Must not be there, or be empty.
        step: Which checkpoint; the newest good one by default.

    Raises:
        TPUValidationError: The folder holds files already, or there is no model at `source`.
        TPUModelError: The model has a feature that no Hugging Face architecture has.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TPUValidationError(
            f"{target} is there already and is not overwritten; name a new folder, or empty it."
        )
    model = load_trained(source, step=step)
    with folder_beside(target) as made:
        export_huggingface(model.params, model.config, made)
        if model.tokenizer is not None and (file := _tokenizer_file(model.tokenizer)) is not None:
            shutil.copyfile(file, made / "tokenizer.json")
        for file in made.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(made / "config.json", file)
        finish_folder(made, target)
    files = sorted(target.iterdir())
    return Export(
        source=model.source,
        step=model.step,
        folder=str(target),
        files=tuple(file.name for file in files),
        size_bytes=sum(file.stat().st_size for file in files),
        parameters=model.config.parameter_count().total,
    )


def _tokenizer_file(tokenizer: str) -> Path | None:
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.is_file() else None
