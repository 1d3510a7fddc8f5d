"""Slow hosts, found from the hosts' own records and readings and told from noise."""

from .comparison import Stragglers as Stragglers
from .comparison import find_stragglers as find_stragglers
from .detection import HostRecords as HostRecords
from .detection import detect_stragglers as detect_stragglers
from .report import Straggler as Straggler
from .report import StragglerReport as StragglerReport
