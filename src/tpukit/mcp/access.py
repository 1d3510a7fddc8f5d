"""What a client of the server may have done: by default nothing but reading and compiling."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, TPUValidationError


@dataclass(frozen=True)
class Access:
    """What a client may have done.

    Attributes:
        code: Whether models named module:function may be imported, which runs their code.
        folder: Where job files may be written; None for nowhere.
    """

    code: bool = False
    folder: Path | None = None

    def check_name(self, name: str) -> None:
        """Refuse a name that would run code.

        Raises:
            ConfigError: It would, and that is not allowed.
        """
        if ":" in name and not self.code:
            raise ConfigError(
                f"{name!r} names code, and this server runs none; start it with --allow-code, or "
                "name a preset, a job file or a config.json."
            )

    def place(self, name: str) -> Path:
        """Return where a job file of that name may be written.

        Raises:
            ConfigError: Nothing may be written.
            TPUValidationError: The name leads elsewhere, or is taken.
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
