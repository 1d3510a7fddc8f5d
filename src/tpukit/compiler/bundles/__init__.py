"""A kernel's final VLIW bundles: parse them, run their scalar program, and time them."""

from .listing import InstructionListing as InstructionListing
from .listing import parse_listing as parse_listing
from .scalar import words_of as words_of
from .trace import Calibration as Calibration
from .trace import CallEstimate as CallEstimate
from .trace import CallRates as CallRates
from .trace import CallTrace as CallTrace
from .trace import ErrorBand as ErrorBand
from .trace import calibration_of as calibration_of
from .trace import describe_band as describe_band
from .trace import error_of as error_of
from .trace import trace_call as trace_call
