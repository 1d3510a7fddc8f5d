"""How a training run handles signals, bad losses and hangs."""

from .loss_guard import Decision as Decision
from .loss_guard import LossGuard as LossGuard
from .preemption import PreemptionGuard as PreemptionGuard
from .watchdog import ExitCode as ExitCode
from .watchdog import HangWatchdog as HangWatchdog

__all__ = ["Decision", "ExitCode", "HangWatchdog", "LossGuard", "PreemptionGuard"]
