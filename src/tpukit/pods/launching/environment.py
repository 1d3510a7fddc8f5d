"""The Python environment that travels to hosts: a lock, a wheel of tpukit, and uv.

uv resolves what tpukit and the job need for every supported Python, with all versions that are
installed here as constraints. So hosts get the versions of this machine, and packages that only
hosts need (libtpu) in the version that the installed jax asks for. The lock contains hashes but no
index address; hosts use the indexes of their own pip or uv settings.
"""

import ast
import functools
import gzip
import hashlib
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, distributions, packages_distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...errors import ConfigError
from ...hardware.figure import count_text
from ...runtime.files import cache_folder, private_folder, temporary_folder, whole_file, write_text
from ...runtime.progress import Progress, silent
from ...runtime.toolchains.running import run_followed
from ...runtime.versions import installed_requirements, installed_version
from ..worker.environment import uv_environment
from ..worker.order import OrderFile, PythonOrder
from .bundle import Bundle
from .wheel import read_origin, write_wheel

PACKAGE = "tpukit"
EXTRAS = ("data", "monitor", "quant", "tensorboard", "wandb")
"""Extras that a training process uses where they are installed; hosts get the same ones."""
OLDEST = "3.11"
SPARE_BYTES = 2_000_000_000
_PYTHON = "Programming Language :: Python :: 3."
_PLATFORM = "x86_64-manylinux_2_28"


@dataclass(frozen=True)
class LockedEnvironment:
    """What hosts install.

    Attributes:
        lock: Requirements file with versions and hashes.
        uv: Compressed executable of uv for hosts.
    """

    lock: Path
    uv: Path

    @property
    def packages(self) -> dict[str, str]:
        """Locked versions by package name."""
        lines = self.lock.read_text(encoding="utf-8").splitlines()
        found = (re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", line) for line in lines)
        return {match[1]: match[2] for match in found if match}

    def order(self, folder: Path) -> PythonOrder:
        """Write the wheel of tpukit to a folder, and return the order for hosts."""
        return PythonOrder(
            lock=OrderFile.of(self.lock),
            wheel=OrderFile.of(write_wheel(PACKAGE, folder)),
            uv=OrderFile.of(self.uv),
            pythons=supported_pythons(),
            packages=len(self.packages),
            disk_bytes=SPARE_BYTES + sum(map(_installed_bytes, self.packages)),
        )

    def __str__(self) -> str:
        return f"tpukit and {count_text(len(self.packages), 'locked package')}"


def lock_environment(
    bundle: Bundle, requirements: Sequence[str], *, progress: Progress = silent
) -> LockedEnvironment:
    """Lock the environment of a job for hosts.

    Args:
        bundle: The job's files; packages that they import are locked too.
        requirements: The job's own requirements (`launch.requirements`).
        progress: Called if the package index is asked.

    Raises:
        ConfigError: uv is missing, a requirement is wrong, or the index does not have a version
            that is installed here.
    """
    names = {canonicalize_name(name) for name in imported_packages(bundle)} - {PACKAGE}
    wanted = [*own_requirements(), *map(_checked, requirements), *sorted(names)]
    return LockedEnvironment(make_lock(wanted, installed_pins(), progress=progress), pack_uv())


def own_requirements() -> list[str]:
    """Return tpukit's requirements for hosts: its own, those of used extras, and jax's for TPUs."""
    lines: list[str] = []
    for line in map(Requirement, installed_requirements(PACKAGE)):
        marker = line.marker
        extras = [extra for extra in EXTRAS if marker and marker.evaluate({"extra": extra})]
        is_own = marker is None or marker.evaluate({"extra": ""})
        if is_own or any(map(_is_complete, extras)):
            lines.append(f"{line.name}{line.specifier}")
    return [*lines, f"jax[tpu]=={installed_version('jax')}"]


def imported_packages(bundle: Bundle) -> set[str]:
    """Return the installed packages that the bundle's Python files import."""
    by_module = packages_distributions()
    modules: set[str] = set()
    for name, content in bundle.files.items():
        if not name.endswith(".py") or isinstance(content, bytes):
            continue
        try:
            nodes = list(ast.walk(ast.parse(content.read_bytes())))
        except SyntaxError:
            continue
        modules |= {
            alias.name.partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        modules |= {
            node.module.partition(".")[0]
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        }
    shipped = {name.partition("/")[0].removesuffix(".py") for name in bundle.files}
    # One of several packages with a common module is enough where others are named elsewhere.
    return {by_module[module][0] for module in modules - shipped if module in by_module}


@functools.cache
def installed_pins() -> Mapping[str, str]:
    """Return the versions of all installed packages, by name.

    A local version ("2.11.0+cpu") names a build of this machine, so only its public part counts.
    """
    pins = {
        canonicalize_name(str(installed.metadata["Name"])): Version(installed.version).public
        for installed in distributions()
        if installed.metadata["Name"] and read_origin(installed) is None
    }
    return dict(sorted(pins.items()))


def make_lock(
    requirements: Sequence[str], pins: Mapping[str, str], *, progress: Progress = silent
) -> Path:
    """Return a requirements file with exact versions and hashes; the index is asked only once.

    Raises:
        ConfigError: No set of packages fits, or a package comes from a folder of this machine.
    """
    wanted = "".join(f"{line}\n" for line in requirements)
    constraints = "".join(f"{name}=={version}\n" for name, version in pins.items())
    digest = hashlib.sha256(f"{OLDEST}\n{wanted}\n{constraints}".encode()).hexdigest()[:20]
    lock = private_folder(cache_folder("locks")) / f"{digest}.txt"
    if lock.exists():
        return lock
    progress("locking the packages of this environment with their hashes")
    with temporary_folder("tpukit-lock-") as folder:
        write_text(folder / "wanted.in", wanted)
        write_text(folder / "installed.txt", constraints)
        command = [
            *(find_uv(), "pip", "compile", "--quiet", "--universal"),
            *("--python-version", OLDEST, "--generate-hashes", "--no-header", "--no-annotate"),
            *("--constraint", "installed.txt", "--output-file", "lock.txt", "wanted.in"),
        ]
        ended = run_followed(command, environment=uv_environment(), folder=folder)
        if ended.code:
            raise ConfigError(
                f"The packages of this environment cannot be locked for hosts: "
                f"{_last_words(ended.errors)} Install versions that a package index has, or "
                "install tpukit on the hosts and set launch.python."
            )
        text = (folder / "lock.txt").read_text(encoding="utf-8")
    _refuse_local_packages(text)
    write_text(lock, text)
    return lock


def supported_pythons() -> tuple[str, ...]:
    """Return the Python versions that tpukit supports, this one first."""
    here = f"3.{sys.version_info.minor}"
    classifiers = distribution(PACKAGE).metadata.get_all("Classifier") or []
    minors = {line.removeprefix(_PYTHON) for line in classifiers if line.startswith(_PYTHON)}
    others = sorted((f"3.{minor}" for minor in minors), key=Version, reverse=True)
    return (here, *(version for version in others if version != here))


def find_uv() -> str:
    """Return the path of uv.

    Raises:
        ConfigError: uv is not installed.
    """
    try:
        from uv import find_uv_bin

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        on_path = shutil.which("uv")
    if on_path is None:
        raise ConfigError(
            "uv makes the environment of hosts, but it is not installed: pip install "
            "'tpukit[hosts]', or install tpukit on the hosts and set launch.python."
        )
    return on_path


def pack_uv() -> Path:
    """Return uv's executable for Linux on x86_64, compressed; made once per version.

    uv is sent with the job, because an image may have neither uv nor pip, and because one file of
    20 MB that needs only glibc is all that it takes.
    """
    ended = run_followed([find_uv(), "--version"], environment=uv_environment())
    version = ended.output.split()[1]
    packed = private_folder(cache_folder("locks")) / f"uv-{version}.gz"
    if packed.exists():
        return packed
    with temporary_folder("tpukit-uv-") as folder:
        runs_here = (platform.system(), platform.machine()) == ("Linux", "x86_64")
        executable = Path(find_uv()) if runs_here else _fetch_uv(version, folder)
        with (
            whole_file(packed) as file,
            gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as archive,
        ):
            archive.write(executable.read_bytes())
    return packed


def _fetch_uv(version: str, folder: Path) -> Path:
    """Fetch uv for hosts from the package index; for machines of another platform."""
    command = [
        *(find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(folder)),
        *("--python-platform", _PLATFORM, "--only-binary", ":all:", f"uv=={version}"),
    ]
    ended = run_followed(command, environment=uv_environment())
    if ended.code:
        raise ConfigError(f"uv cannot be fetched for hosts: {_last_words(ended.errors)}")
    return folder / "bin" / "uv"


def _refuse_local_packages(lock: str) -> None:
    """Refuse a lock with a package that is installed here from a folder or an archive.

    An index may have another package of the same name.
    """
    for installed in distributions():
        name = canonicalize_name(str(installed.metadata["Name"]))
        if read_origin(installed) is not None and re.search(rf"^{re.escape(name)}==", lock, re.M):
            raise ConfigError(
                f"{name} is needed, but it is installed here from a folder or an archive, which "
                "hosts cannot fetch; name its folder in launch.include, or install it from a "
                "package index."
            )


def _checked(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement as error:
        message = str(error).splitlines()[0]
        raise ConfigError(
            f"launch.requirements has {text!r}, which is no requirement ({message}); expected for "
            "example einops or einops>=0.8."
        ) from None


def _is_complete(extra: str) -> bool:
    """Return whether all packages of one of tpukit's extras are installed."""
    lines = [Requirement(line) for line in installed_requirements(PACKAGE)]
    of_extra = [
        line
        for line in lines
        if line.marker
        and line.marker.evaluate({"extra": extra})
        and not line.marker.evaluate({"extra": ""})
    ]
    return all(installed_version(line.name) is not None for line in of_extra)


@functools.cache
def _installed_bytes(package: str) -> int:
    """Return the size of an installed package; libtpu's usual size for one that is not here."""
    if installed_version(package) is None:
        return 500_000_000 if package == "libtpu" else 0
    return sum(file.size or 0 for file in distribution(package).files or ())


def _last_words(errors: str) -> str:
    lines: Iterable[str] = (line.strip(" ×╰─▶│├") for line in errors.splitlines())
    text = " ".join(line for line in lines if line)
    return text[:600] or "uv gave no reason."
