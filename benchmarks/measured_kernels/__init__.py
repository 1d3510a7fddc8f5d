"""Measured kernels compiled again and timed by tpukit, so that its estimates are scored."""

from .programs import MeasuredProgram as MeasuredProgram
from .programs import program_of as program_of
from .report import TimingsScore as TimingsScore
from .rows import MeasuredRow as MeasuredRow
from .rows import Timings as Timings
from .rows import read_timings as read_timings
from .score import score_timings as score_timings
