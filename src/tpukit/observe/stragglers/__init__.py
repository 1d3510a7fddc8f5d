"""Slow hosts, detected in the hosts' own records and readings."""

from .comparison import Straggler as Straggler
from .comparison import StragglerReport as StragglerReport
from .comparison import Stragglers as Stragglers
from .comparison import find_stragglers as find_stragglers
from .detection import HostRecords as HostRecords
from .detection import detect_stragglers as detect_stragglers
