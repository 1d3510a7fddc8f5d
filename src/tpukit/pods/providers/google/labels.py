"""Labels as Google Cloud takes them."""

import re
from collections.abc import Mapping

from ....errors import ConfigError

_TEXT = re.compile(r"[a-z0-9_-]{0,63}")


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels that every resource of Google Cloud can carry.

    Raises:
        ConfigError: One has other characters, or is too long.
    """
    for key, value in labels.items():
        if not (_TEXT.fullmatch(value) and _TEXT.fullmatch(key) and key[:1].isalpha()):
            near = re.sub(r"[^a-z0-9_-]+", "-", value.lower())[:63]
            raise ConfigError(
                f"Label {key}={value!r}: Google Cloud takes a-z, 0-9, '-' and '_', 63 at most. "
                f"Try {near!r}."
            )
    return dict(labels)
