"""Results that documents read like dictionaries: `diagnosis["summary"]`."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ..shown import Shown


class MappedResult(Shown, Mapping[str, Any]):
    """A result whose plain data are also read key by key."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain data."""

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())
