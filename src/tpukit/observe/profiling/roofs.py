"""How many FLOPs a device can do for each byte it moves: the corner of its roofline."""

from dataclasses import dataclass

from ...errors import SliceError
from ...hardware import get_chip
from ...hardware.figure import Origin
from .recording import DeviceTrack

# Where no data sheet says it: the vector unit's peak beside the matrix unit's. An H200 has 989
# bf16 and 67 fp32 TFLOP/s; TPUs have one to two of the vector unit's for thirty of the matrix unit.
VECTOR_SHARE = 1 / 16
# FLOP/byte of a CPU: a server core does some 50 to 150 GFLOP/s and gets 10 to 20 GB/s of memory.
CPU_RIDGE = 8.0
# Tensor-core bf16 FLOPs of a multiprocessor in one cycle, and fp32 FLOPs, by compute capability:
# NVIDIA's data sheets divided by multiprocessors and boost clock.
GPU_FLOPS_PER_CYCLE = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
}


@dataclass(frozen=True)
class Roof:
    """The corner of a roofline, for products and for elementwise arithmetic.

    Attributes:
        matrix_ridge: FLOP/byte from which on the matrix unit bounds a product.
        vector_ridge: FLOP/byte from which on the vector unit bounds elementwise work.
        source: Where both are taken from.
    """

    matrix_ridge: float
    vector_ridge: float
    origin: Origin
    source: str

    def is_compute_bound(self, matrix_flops: float, vector_flops: float, moved: float) -> bool:
        """Whether arithmetic takes longer than moving the bytes."""
        return max(matrix_flops / self.matrix_ridge, vector_flops / self.vector_ridge) >= moved


def roof_of(track: DeviceTrack, device_kind: str) -> Roof:
    """The roof of the device that recorded a track, by the surest source there is.

    Args:
        track: What the device did, with what it says of itself.
        device_kind: What jax calls it, where that is known.
    """
    if track.platform == "TPU":
        return _tpu_roof(track, device_kind)
    if track.platform == "GPU":
        return _gpu_roof(track)
    source = f"{CPU_RIDGE:g} FLOP/byte, usual for server CPUs"
    return Roof(CPU_RIDGE, CPU_RIDGE, "model", source)


def _tpu_roof(track: DeviceTrack, device_kind: str) -> Roof:
    try:
        chip = get_chip(device_kind or str(track.properties.get("device_type_string", "")))
        peak = chip.peak("bf16").require("the roofline") * 1e12
        rate = chip.hbm_gbps.require("the roofline") * 1e9
        return Roof(peak / rate, VECTOR_SHARE * peak / rate, "datasheet", f"catalog: {chip.name}")
    except SliceError:
        return _own_roof(track) or _usual_roof(240.0, "usual for TPUs")


def _gpu_roof(track: DeviceTrack) -> Roof:
    """From what the driver says of the device; the profiler writes it into the file."""
    own = {
        name: value for name, value in track.properties.items() if isinstance(value, int | float)
    }
    version = int(own.get("compute_cap_major", 0)), int(own.get("compute_cap_minor", 0))
    rates = GPU_FLOPS_PER_CYCLE.get(version)
    needed = ("clock_rate", "core_count", "memory_bandwidth")
    if rates is None or not all(own.get(name) for name in needed):
        return _own_roof(track) or _usual_roof(200.0, "usual for data-centre GPUs")
    cycles = own["clock_rate"] * 1e3 * own["core_count"]  # clock in kHz
    matrix, vector = (rate * cycles / own["memory_bandwidth"] for rate in rates)
    words = f"driver: compute capability {version[0]}.{version[1]}, its clock and bandwidth"
    return Roof(matrix, vector, "datasheet", words)


def _own_roof(track: DeviceTrack) -> Roof | None:
    """The peaks that the runtime wrote beside the device, where it did."""
    peak = track.properties.get("peak_teraflops_per_second")
    rate = track.properties.get("peak_hbm_bw_gigabytes_per_second")
    if not isinstance(peak, int | float) or not isinstance(rate, int | float) or not peak * rate:
        return None
    ridge = peak * 1e3 / rate
    return Roof(ridge, VECTOR_SHARE * ridge, "datasheet", "peaks that the runtime recorded")


def _usual_roof(ridge: float, words: str) -> Roof:
    return Roof(ridge, VECTOR_SHARE * ridge, "model", f"{ridge:g} FLOP/byte, {words}")
