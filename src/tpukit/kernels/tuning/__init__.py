"""Block sizes chosen by static timing, or by measuring on the TPU that is here."""

from .result import Trial as Trial
from .result import TuningResult as TuningResult
from .search import local_chip as local_chip
from .search import measured_timer as measured_timer
from .search import tune_op as tune_op
