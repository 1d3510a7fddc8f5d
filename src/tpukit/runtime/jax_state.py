"""How far jax has come in this process, learnt without importing it."""

import sys
from typing import Literal

JaxState = Literal["absent", "imported", "initialised"]


def jax_state() -> JaxState:
    """Whether jax is absent, imported, or has opened its devices (then variables are settled)."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return "absent"
    return "initialised" if bridge.backends_are_initialized() else "imported"
