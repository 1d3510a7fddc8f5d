"""Maintenance that is announced: v2alpha1 alone shows it, so it is asked now and then."""

import logging
import time
from collections.abc import Sequence

from google.api_core import exceptions

from .api import CloudTPU

logger = logging.getLogger(__name__)
INTERVAL_S = 60.0
"""Between two looks at a pod: scheduled maintenance is announced days before."""
_TIMEOUT_S = 2.0


class MaintenanceNotices:
    """What is known of coming maintenance, by pod."""

    def __init__(self, api: CloudTPU) -> None:
        self._api = api
        self._seen: dict[str, tuple[float, str]] = {}
        self._offered = True

    def of(self, queued_name: str, node_names: Sequence[str]) -> str:
        """Return a sentence about maintenance of a pod's nodes that is to come, or ""."""
        at, notice = self._seen.get(queued_name, (float("-inf"), ""))
        if self._offered and time.monotonic() - at > INTERVAL_S:
            notice = next(filter(None, map(self._look, node_names)), "")
            self._seen[queued_name] = time.monotonic(), notice
        return notice

    def forget(self, queued_name: str) -> None:
        """Drop what is known of a pod that was deleted."""
        self._seen.pop(queued_name, None)

    def _look(self, node_name: str) -> str:
        if not self._offered:
            return ""
        try:
            node = self._api.alpha.get_node(name=node_name, retry=None, timeout=_TIMEOUT_S)
        except (exceptions.PermissionDenied, exceptions.MethodNotImplemented) as error:
            logger.warning("Coming maintenance is not visible (%s).", type(error).__name__)
            self._offered = False
            return ""
        except exceptions.GoogleAPICallError:
            return ""  # no reason to lose sight of a pod that runs; asked again later
        window = node.upcoming_maintenance
        if not window.window_start_time:
            return ""
        return f"maintenance from {window.window_start_time} to {window.window_end_time}"
