"""Step-time prediction: a scheduled program simulated on the chip's own figures."""

from .machine import Machine as Machine
from .network import Network as Network
from .prediction import OpTime as OpTime
from .prediction import StepPrediction as StepPrediction
from .prediction import predict_step as predict_step
from .simulate import CAUSES as CAUSES
from .simulate import KernelTimer as KernelTimer
from .simulate import Simulation as Simulation
from .simulate import TrackSpan as TrackSpan

__all__ = [
    "CAUSES",
    "KernelTimer",
    "Machine",
    "Network",
    "OpTime",
    "Simulation",
    "StepPrediction",
    "TrackSpan",
    "predict_step",
]
