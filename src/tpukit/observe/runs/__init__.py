"""Run directories, read while they are written: summary, series, events, goodput, stragglers."""

from .run import Run as Run
from .run import find_runs as find_runs
from .series import Series as Series
from .summary import RunSummary as RunSummary
