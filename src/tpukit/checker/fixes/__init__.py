"""What could make a training step fit: candidates with an estimate, each checked by a compile.

An estimate is simple arithmetic on the memory report (origin `model`): what a change acts on is
scaled, everything else stays. Only a compile (origin `compiler`) says whether it is so.
"""

from .candidates import JobShape as JobShape
from .fix import Fix as Fix
from .fix import FixList as FixList
from .proposing import is_thin as is_thin
from .proposing import propose_fixes as propose_fixes
from .proposing import rank as rank

__all__ = ["Fix", "FixList", "JobShape", "is_thin", "propose_fixes", "rank"]
