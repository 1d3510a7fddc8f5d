"""The compiler's final bundles of a kernel: read, run for what decides its course, and timed."""

from .calibration import Calibration as Calibration
from .calibration import ErrorBand as ErrorBand
from .calibration import calibration_of as calibration_of
from .calibration import describe_band as describe_band
from .calibration import error_of as error_of
from .listing import InstructionListing as InstructionListing
from .listing import parse_listing as parse_listing
from .tables import words_of as words_of
from .trace import CallEstimate as CallEstimate
from .trace import CallRates as CallRates
from .trace import CallTrace as CallTrace
from .trace import trace_call as trace_call
