"""The archive for every host: the job, the files it names, and those of `launch.include`.

No other file is shipped. The same files always give the same bytes, so a host recognizes a bundle
that it already has.
"""

import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...hardware.figure import bytes_text, count_text
from ...job.job import Job
from ...job.model_source import PREFIX, is_huggingface, is_own_model
from ...job.yaml_text import write_yaml
from ...runtime.files import write_bytes
from ...runtime.secrets import find_secret_in_file
from ...training.data.sources import is_data_function

_NAMES = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", ".env", ".env.*", "*.env", ".netrc", "_netrc", ".npmrc"),
    *(".pypirc", ".git-credentials", "*credentials*", "*service-account*.json", ".pgpass"),
    *("*service_account*.json", "kubeconfig*", ".dockerconfigjson", ".dockercfg", "*secret*.json"),
    *("*secret*.yaml", "*secret*.yml", "*.token", ".boto", "access_tokens.db", "*.ovpn"),
)
# Ends of paths at which programs store credentials.
_PLACES = (
    *(".kube/config", ".docker/config.json", ".aws/config", ".ssh/*", ".gnupg/*", ".azure/*"),
    *(".config/gcloud/*", ".config/gh/hosts.yml", "huggingface/token", "huggingface/stored_tokens"),
)


def looks_like_credentials(path: Path) -> str | None:
    """Return why a file looks like credentials, or None."""
    name, place = path.name.lower(), path.as_posix().lower()
    for pattern in _NAMES:
        if fnmatch(name, pattern):
            return f"its name matches {pattern}"
    for pattern in _PLACES:
        if fnmatch(place, f"*/{pattern}"):
            return f"credentials are stored at {pattern}"
    what = find_secret_in_file(path)
    return None if what is None else f"it contains {what}"


JOB_FILE = "job.yaml"
LARGEST_BYTES = 1 << 30
_NEVER = frozenset({"__pycache__", ".git", ".hg", ".svn", ".venv", ".cache", ".DS_Store"})


@dataclass(frozen=True)
class Bundle:
    """Files by their path on a host."""

    files: dict[str, bytes | Path]
    modes: dict[str, int]

    @property
    def content_bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(
            len(file) if isinstance(file, bytes) else file.stat().st_size
            for file in self.files.values()
        )

    def write(self, path: Path) -> str:
        """Write the archive, and return its digest."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(self.files):
                content = self.files[name]
                data = content if isinstance(content, bytes) else content.read_bytes()
                entry = tarfile.TarInfo(name)  # without owner and time: same files, same bytes
                entry.size, entry.mode = len(data), self.modes.get(name, 0o644)
                archive.addfile(entry, io.BytesIO(data))
        write_bytes(path, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"files": sorted(self.files), "bytes": self.content_bytes}

    def __str__(self) -> str:
        return f"{count_text(len(self.files), 'file')}, {bytes_text(self.content_bytes)}"


def make_bundle(job: Job, *, folder: Path | None = None) -> Bundle:
    """Collect the files that a job needs.

    The shipped job file has no `launch:` section, because hosts do not need it and it may contain
    secrets.

    Args:
        job: The job. Its model's file or package, tokenizer, local data and `launch.include` are
            shipped.
        folder: Folder that the job's paths are relative to; by default the current one.

    Raises:
        ConfigError: A file is missing, is outside the folder, looks like credentials without being
            named itself, or the files are too large together.
    """
    folder = (folder or Path.cwd()).resolve()
    shipped = {key: value for key, value in job.to_dict().items() if key != "launch"}
    files: dict[str, Path] = {}
    named: set[str] = set()
    for text in job.launch.include:
        path = _inside(text, folder, "launch.include")
        if path.is_file():
            named.add(path.relative_to(folder).as_posix())
        files |= _files_below(path, folder)
    for text in (*_model_files(job, folder), *_data_files(job, folder)):
        files |= _files_below(_inside(text, folder, "the job"), folder)
    if JOB_FILE in files:
        raise ConfigError(
            f"launch.include names {JOB_FILE}, but that is the name of the job file on a host; "
            "rename the file."
        )
    for name, path in files.items():
        if name not in named and (why := looks_like_credentials(path)):
            raise ConfigError(
                f"{name} is not shipped, because {why}. Remove it from the job's files. If hosts "
                "need it, name exactly this file in launch.include."
            )
    modes = {name: 0o755 for name, path in files.items() if os.access(path, os.X_OK)}
    bundle = Bundle({JOB_FILE: write_yaml(shipped).encode(), **files}, modes)
    if bundle.content_bytes > LARGEST_BYTES:
        raise ConfigError(
            f"The job ships {bundle}, but at most {bytes_text(LARGEST_BYTES)} are allowed; put "
            "data into a bucket (gs://…)."
        )
    return bundle


def modules_not_shipped(bundle: Bundle, *, folder: Path | None = None) -> list[str]:
    """Return imports of shipped modules that are files of the folder and are not shipped."""
    import ast

    folder = (folder or Path.cwd()).resolve()
    warnings: dict[str, None] = {}
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
                warnings[f"{name} imports {there.name}, which is not shipped: launch.include"] = (
                    None
                )
    return list(warnings)


def _imported(tree: Any) -> Iterable[str]:
    import ast

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _is_shipped(path: Path, folder: Path, bundle: Bundle) -> bool:
    name = path.relative_to(folder).as_posix()
    return name in bundle.files or any(path.startswith(f"{name}/") for path in bundle.files)


def _model_files(job: Job, folder: Path) -> list[str]:
    model = str(job.model)
    if is_own_model(model):
        return _code_files(model.removeprefix(PREFIX), folder)
    return [model] if is_huggingface(model) else []


def _code_files(name: str, folder: Path) -> list[str]:
    """Return the file, or the folder's package, that `file.py:function` names."""
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        return [module]
    there = _module_path(module, folder)  # otherwise it is an installed package
    return [] if there is None else [there.relative_to(folder).as_posix()]


def _module_path(module: str, folder: Path) -> Path | None:
    """Return the folder's file or package for a module name."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names:
        return None
    package = folder / first
    file = folder / f"{first}.py"
    return package if (package / "__init__.py").is_file() else file if file.is_file() else None


def _data_files(job: Job, folder: Path) -> list[str]:
    """Return local data and tokenizer files; absolute paths are taken from the hosts."""
    sources = (job.train.data, job.train.eval_data, job.train.tokenizer)
    own = [text for text in sources if text and "://" not in text and not Path(text).is_absolute()]
    code = [file for text in own if is_data_function(text) for file in _code_files(text, folder)]
    return [*code, *(text for text in own if Path(text).exists())]


def _inside(text: str, folder: Path, who: str) -> Path:
    path = (folder / text).resolve()
    if not path.exists():
        raise ConfigError(f"{who} names {text}, but {folder} has no such file.")
    if folder not in path.parents and path != folder:
        raise ConfigError(
            f"{who} names {text}, which is outside {folder}; only files in the folder from which "
            "a job is launched can be shipped."
        )
    return path


def _files_below(path: Path, folder: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.relative_to(folder).as_posix(): path}
    files: dict[str, Path] = {}
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.is_file() and not _NEVER & {*parts}:
            if folder not in file.resolve().parents:
                raise ConfigError(
                    f"{file.relative_to(folder)} is a link to a file outside {folder}; only files "
                    "in the folder can be shipped."
                )
            files[file.relative_to(folder).as_posix()] = file
    return files
