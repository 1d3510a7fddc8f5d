"""What a client of the server may do; by default only reading and compiling."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, TPUValidationError


@dataclass(frozen=True)
class Access:
    """Permissions of a client.

    Attributes:
        code: Whether models named module:function may be imported, which runs their code.
        folder: Folder for job files; None forbids writing.
    """

    code: bool = False
    folder: Path | None = None

    def check_name(self, name: str) -> None:
        """Refuse a name that would run code.

        Raises:
            ConfigError: The name is code, which is not allowed.
        """
        if ":" in name and not self.code:
            raise ConfigError(
                f"{name!r} names code, and this server runs none; start it with --allow-code, or "
                "name a preset, a job file or a config.json."
            )

    def place(self, name: str) -> Path:
        """Return the path of a new job file.

        Raises:
            ConfigError: Writing is not allowed.
            TPUValidationError: The name has folders, or the file exists.
        """
        if self.folder is None:
            raise ConfigError("this server writes nothing; start it with --write FOLDER.")
        path = self.folder / name
        if Path(name).name != name or path.suffix not in (".yaml", ".yml"):
            raise TPUValidationError(
                f"{name!r} is no name of a job file; expected one without folders that ends in "
                ".yaml."
            )
        if path.exists():
            raise TPUValidationError(f"{path} is there already and is not replaced; name another.")
        return path
