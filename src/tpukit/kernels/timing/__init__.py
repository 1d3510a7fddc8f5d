"""The time of Pallas kernels with no TPU: compiled, run through, and timed at fitted rates."""

from ...compiler.bundles import Calibration as Calibration
from ...compiler.bundles import ErrorBand as ErrorBand
from ...compiler.bundles import calibration_of as calibration_of
from ...compiler.bundles import error_of as error_of
from .bench import BenchRow as BenchRow
from .bench import KernelBench as KernelBench
from .bench import bench_op as bench_op
from .bench import default_implementations as default_implementations
from .bench import estimate as estimate
from .estimating import KernelEstimate as KernelEstimate
from .estimating import estimate_kernel as estimate_kernel
from .estimating import time_profile as time_profile
from .profile import KernelProfile as KernelProfile
from .profile import count_bundles as count_bundles
from .profile import profile_kernel as profile_kernel
