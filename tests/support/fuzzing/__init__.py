"""What tpukit reads from others, kind by kind; `KINDS` has them all."""

from . import data, models, records, settings
from .kinds import KINDS

__all__ = ["KINDS", "data", "models", "records", "settings"]
