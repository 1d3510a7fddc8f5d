"""Maintenance that is announced: v2alpha1 alone shows it, so it is asked now and then.

One call shows every node of a zone, however many pods are there: calls have a quota.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping

from google.api_core import exceptions
from google.cloud import tpu_v2alpha1

from .api import PAGE, CloudTPU
from .reading import node_key

logger = logging.getLogger(__name__)
INTERVAL_S = 60.0
"""Between two looks at a zone: scheduled maintenance is announced days before."""
_TIMEOUT_S = 2.0

NodeKey = tuple[str, str]


class MaintenanceNotices:
    """What is known of coming maintenance."""

    def __init__(self, api: CloudTPU) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._looked_at: dict[str, float] = {}
        self._notices: dict[NodeKey, str] = {}  # of every node that was looked at
        self._offered = True

    def look(self, nodes: Collection[NodeKey]) -> Mapping[NodeKey, str]:
        """Return a sentence for each node that is announced to be maintained.

        Args:
            nodes: Those that are there. Their zones are looked at every minute, and at once where
                one of them is new.
        """
        with self._lock:
            for zone in {zone for zone, _ in nodes}:
                here = {key for key in nodes if key[0] == zone}
                age_s = time.monotonic() - self._looked_at.get(zone, float("-inf"))
                if self._offered and (age_s > INTERVAL_S or not here <= self._notices.keys()):
                    self._refresh(zone, here)
            return {key: text for key, text in self._notices.items() if text}

    def _refresh(self, zone: str, here: set[NodeKey]) -> None:
        try:
            found = self._ask(zone)
        except (exceptions.PermissionDenied, exceptions.MethodNotImplemented) as error:
            logger.warning("Coming maintenance is not visible (%s).", type(error).__name__)
            self._offered = False
            return
        except exceptions.GoogleAPICallError:
            # What was known holds on: no reason to lose sight of pods that run.
            found = {key: text for key, text in self._notices.items() if key[0] == zone}
        self._looked_at[zone] = time.monotonic()
        others = {key: text for key, text in self._notices.items() if key[0] != zone}
        # Lists may be late, and a node that is not in this one is not waited for.
        self._notices = others | dict.fromkeys(here, "") | found

    def _ask(self, zone: str) -> dict[NodeKey, str]:
        request = tpu_v2alpha1.ListNodesRequest(parent=self._api.parent(zone), page_size=PAGE)
        nodes = self._api.alpha.list_nodes(request, retry=None, timeout=_TIMEOUT_S)
        return {node_key(node.name): _notice(node) for node in nodes}


def _notice(node: tpu_v2alpha1.Node) -> str:
    window = node.upcoming_maintenance
    if not window.window_start_time:
        return ""
    return f"maintenance from {window.window_start_time} to {window.window_end_time}"
