"""The archive that goes to every host: the job, what it names, what `launch.include` names.

Nothing else of the folder is shipped. The same files give the same bytes, so that a host that has
a bundle already knows it.
"""

import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...hardware.figure import bytes_text, count_text
from ...job.job import Job
from ...job.model_source import is_huggingface, is_own_model
from ...job.torch_source import PREFIX
from ...job.yaml_text import write_yaml
from ...runtime.files import write_bytes
from ...training.data.sources import is_data_function
from .secrets import looks_like_credentials

JOB_FILE = "job.yaml"
LARGEST_BYTES = 1 << 30
_NEVER = frozenset({"__pycache__", ".git", ".hg", ".svn", ".venv", ".cache", ".DS_Store"})


@dataclass(frozen=True)
class Bundle:
    """Files by the path that they have on a host."""

    files: dict[str, bytes | Path]
    modes: dict[str, int]

    @property
    def content_bytes(self) -> int:
        """Bytes of all files."""
        return sum(
            len(one) if isinstance(one, bytes) else one.stat().st_size
            for one in self.files.values()
        )

    def write(self, path: Path) -> str:
        """Write the archive, and return the digest of its bytes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(self.files):
                content = self.files[name]
                data = content if isinstance(content, bytes) else content.read_bytes()
                entry = tarfile.TarInfo(name)  # no owner, no time: the same files, the same bytes
                entry.size, entry.mode = len(data), self.modes.get(name, 0o644)
                archive.addfile(entry, io.BytesIO(data))
        write_bytes(path, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"files": sorted(self.files), "bytes": self.content_bytes}

    def __str__(self) -> str:
        return f"{count_text(len(self.files), 'file')}, {bytes_text(self.content_bytes)}"


def make_bundle(job: Job, *, folder: Path | None = None) -> Bundle:
    """Collect what a job names.

    The job file that is shipped says nothing of `launch:`, which is not for the hosts and may hold
    secrets.

    Args:
        job: Its model's file or package, tokenizer, local data and `launch.include` are shipped.
        folder: What its paths are relative to; the current one by default.

    Raises:
        ConfigError: A file is not there, lies outside the folder, looks like credentials and was
            not named itself, or all are too large.
    """
    folder = (folder or Path.cwd()).resolve()
    said = {key: value for key, value in job.to_dict().items() if key != "launch"}
    found: dict[str, Path] = {}
    named: set[str] = set()
    for text in job.launch.include:
        path = _inside(text, folder, "launch.include")
        if path.is_file():
            named.add(path.relative_to(folder).as_posix())
        found |= _files_below(path, folder)
    for text in (*_model_files(job, folder), *_data_files(job, folder)):
        found |= _files_below(_inside(text, folder, "the job"), folder)
    if JOB_FILE in found:
        raise ConfigError(
            f"launch.include names {JOB_FILE}, which is what the job itself is called on a host; "
            "rename the file."
        )
    for name, path in found.items():
        if name not in named and (why := looks_like_credentials(path)):
            raise ConfigError(
                f"{name} is not shipped, because {why}. Take it out of what the job ships; if "
                "hosts need it, name this very file in launch.include."
            )
    modes = {name: 0o755 for name, path in found.items() if os.access(path, os.X_OK)}
    bundle = Bundle({JOB_FILE: write_yaml(said).encode(), **found}, modes)
    if bundle.content_bytes > LARGEST_BYTES:
        raise ConfigError(
            f"The job ships {bundle}, and {bytes_text(LARGEST_BYTES)} are the most; put data where "
            "hosts read it themselves, such as gs://…."
        )
    return bundle


def modules_not_shipped(bundle: Bundle, *, folder: Path | None = None) -> list[str]:
    """Say which files of the folder shipped modules import and that are not shipped."""
    import ast

    folder = (folder or Path.cwd()).resolve()
    told: dict[str, None] = {}
    for name, content in bundle.files.items():
        if not name.endswith(".py") or isinstance(content, bytes):
            continue
        try:
            tree = ast.parse(content.read_bytes())
        except SyntaxError:
            continue
        for module in _imported(tree):
            there = _module_path(module, folder)
            if there is not None and not _is_shipped(there, folder, bundle):
                told[f"{name} imports {there.name}, which is not shipped: launch.include"] = None
    return list(told)


def _imported(tree: Any) -> Iterable[str]:
    import ast

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _is_shipped(path: Path, folder: Path, bundle: Bundle) -> bool:
    name = path.relative_to(folder).as_posix()
    return name in bundle.files or any(one.startswith(f"{name}/") for one in bundle.files)


def _model_files(job: Job, folder: Path) -> list[str]:
    model = str(job.model)
    if is_own_model(model):
        return _code_files(model.removeprefix(PREFIX), folder)
    return [model] if is_huggingface(model) else []


def _code_files(name: str, folder: Path) -> list[str]:
    """Return the file, or the package of the folder, that `file.py:function` names."""
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        return [module]
    there = _module_path(module, folder)  # else it is installed, here and there
    return [] if there is None else [there.relative_to(folder).as_posix()]


def _module_path(module: str, folder: Path) -> Path | None:
    """Return the file or the package of the folder that a module's first name stands for."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names:
        return None
    package = folder / first
    file = folder / f"{first}.py"
    return package if (package / "__init__.py").is_file() else file if file.is_file() else None


def _data_files(job: Job, folder: Path) -> list[str]:
    """Return local files of data and tokenizers; absolute paths are the hosts' own."""
    said = (job.train.data, job.train.eval_data, job.train.tokenizer)
    own = [text for text in said if text and "://" not in text and not Path(text).is_absolute()]
    code = [file for text in own if is_data_function(text) for file in _code_files(text, folder)]
    return [*code, *(text for text in own if Path(text).exists())]


def _inside(text: str, folder: Path, who: str) -> Path:
    path = (folder / text).resolve()
    if not path.exists():
        raise ConfigError(f"{who} names {text}, and there is no such file in {folder}.")
    if folder not in path.parents and path != folder:
        raise ConfigError(
            f"{who} names {text}, which lies outside {folder}; only what is in the folder that a "
            "job is launched from can be shipped."
        )
    return path


def _files_below(path: Path, folder: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.relative_to(folder).as_posix(): path}
    found: dict[str, Path] = {}
    for one in sorted(path.rglob("*")):
        parts = one.relative_to(folder).parts
        if one.is_file() and not _NEVER & {*parts}:
            if folder not in one.resolve().parents:
                raise ConfigError(
                    f"{one.relative_to(folder)} is a link to a file outside {folder}; only what "
                    "is in the folder can be shipped."
                )
            found[one.relative_to(folder).as_posix()] = one
    return found
