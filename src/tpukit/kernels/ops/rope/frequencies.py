"""Rotary frequencies, and the published ways to stretch them to a longer context."""

import math

import numpy as np

from ....errors import TPUKernelError
from ....rotary import RopeScaling


def rope_frequencies(
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
    length: int | None = None,
) -> np.ndarray:
    """Radians per position for each of the `head_dim / 2` channel pairs, in float64.

    Args:
        head_dim: Channels of a head.
        theta: The base.
        scaling: How to stretch them; None leaves them.
        length: Of the sequence, which dynamic and longrope scaling depend on.

    Raises:
        TPUKernelError: The head has an odd number of channels, or a length is missing.
    """
    if head_dim % 2:
        raise TPUKernelError(
            f"RoPE rotates pairs of channels and the head has {head_dim}; it must be even."
        )
    if scaling is not None and scaling.kind == "dynamic":
        theta = _raised_base(head_dim, theta, scaling, length)
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / _own_factors(head_dim, scaling, length)
    if scaling.kind == "yarn":
        kept = _kept_by_turns(head_dim, theta, scaling)
    else:
        kept = _kept_by_wavelength(frequencies, scaling)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _own_factors(head_dim: int, scaling: RopeScaling, length: int | None) -> np.ndarray:
    long = length is not None and length > scaling.original_max_seq_len
    factors = scaling.long_factors if long else scaling.short_factors
    if len(factors) != head_dim // 2:
        raise TPUKernelError(
            f"longrope has {len(factors)} factors for heads of {head_dim} rotated channels; give "
            f"{head_dim // 2}, one for each pair."
        )
    return np.asarray(factors, np.float64)


def _raised_base(head_dim: int, theta: float, scaling: RopeScaling, length: int | None) -> float:
    if length is None:
        raise TPUKernelError(
            "Dynamic RoPE scaling depends on the length of the sequence and none was given; give "
            "length=, or use linear, llama3 or yarn."
        )
    longer = max(length, scaling.original_max_seq_len) / scaling.original_max_seq_len
    return theta * (scaling.factor * longer - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))


def _kept_by_wavelength(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """1 where a frequency is kept, 0 where it is divided, between the two linear in rotations."""
    rotations = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    # Equal factors leave nothing to blend: a frequency is kept or divided.
    spread = max(scaling.high_freq_factor - scaling.low_freq_factor, 1e-9)
    return np.clip((rotations - scaling.low_freq_factor) / spread, 0.0, 1.0)


def _kept_by_turns(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The ramp of the YaRN paper, over channel numbers rounded outwards as its authors do."""

    def channel(rotations: float) -> float:
        wavelength = scaling.original_max_seq_len / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    channels = np.arange(head_dim // 2, dtype=np.float64)
    return 1 - np.clip((channels - first) / max(last - first, 1e-3), 0.0, 1.0)
