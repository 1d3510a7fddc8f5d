"""Make a wheel of an installed package, so that hosts get the very code that runs here.

No build backend is needed: the files of an installed package are those that its RECORD lists, and
those of an editable one are its source folder. The same files always give the same bytes.
"""

import base64
import hashlib
import json
import zipfile
from collections.abc import Mapping
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path

from ...errors import ConfigError
from ...runtime.files import whole_file

# Written by installers, not by the wheel.
_INSTALLERS = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the oldest time that a zip archive can state


def write_wheel(package: str, folder: Path) -> Path:
    """Write the wheel of an installed pure-Python package, and return its path.

    Args:
        package: Name of a package that has one import package of the same name.
        folder: Folder to write to.

    Raises:
        ConfigError: The package has compiled code, or a file of it is missing.
    """
    installed = distribution(package)
    files = _files(installed, package)
    stem = f"{package}-{installed.version}"
    tags = (installed.read_text("WHEEL") or "").split("Tag: ")[1:]
    if [tag.split()[0] for tag in tags] != ["py3-none-any"]:
        raise ConfigError(
            f"{package} is installed with code for one platform, so no wheel of it can be made for "
            "hosts; install tpukit on the hosts, and set launch.python."
        )
    record = f"{stem}.dist-info/RECORD"
    contents = {name: path.read_bytes() for name, path in sorted(files.items())}
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items()]
    contents[record] = "".join([*lines, f"{record},,\n"]).encode()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with whole_file(wheel) as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return wheel


def is_editable(installed: Distribution) -> bool:
    """Return whether a package is imported from its source folder."""
    origin = read_origin(installed)
    return isinstance(origin, dict) and bool(origin.get("dir_info", {}).get("editable"))


def read_origin(installed: Distribution) -> Mapping[str, dict[str, bool]] | None:
    """Return where a package came from if it was not a package index, as PEP 610 records it."""
    text = installed.read_text("direct_url.json")
    return None if text is None else json.loads(text)


def _files(installed: Distribution, package: str) -> dict[str, Path]:
    """Return the package's files by their names in a wheel."""
    listed = {str(path): Path(str(path.locate())) for path in installed.files or ()}
    files = {
        name: path
        for name, path in listed.items()
        if not name.startswith("..") and path.name not in _INSTALLERS and path.suffix != ".pyc"
    }
    if not is_editable(installed):
        return files
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    described = {name: path for name, path in files.items() if ".dist-info/" in name}
    return described | {
        f"{package}/{path.relative_to(source).as_posix()}": path
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
