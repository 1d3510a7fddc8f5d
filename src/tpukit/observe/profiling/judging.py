"""What bounds one op: by its program and the device's roofline, else by opcode, else by name."""

import re
from dataclasses import dataclass

from ...compiler.hlo.collectives import kind_of
from ...errors import SliceError
from ...hardware import get_chip
from ...hardware.figure import Origin
from .programs import OpFacts
from .recording import DeviceTrack, HostRecording, OpEvent

# The vector unit's peak as a share of the matrix unit's, where no data sheet has it. An H200 has
# 989 bf16 and 67 fp32 TFLOP/s; on TPUs the ratio is one or two to thirty.
VECTOR_SHARE = 1 / 16
# FLOP/byte of a CPU: a server core does some 50 to 150 GFLOP/s and gets 10 to 20 GB/s of memory.
CPU_RIDGE = 8.0
# FLOPs per multiprocessor and cycle (tensor-core bf16, fp32) by compute capability: NVIDIA's data
# sheets divided by multiprocessors and boost clock.
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
    """The ridge points of a roofline, for matmuls and for elementwise arithmetic.

    Attributes:
        matrix_ridge: FLOP/byte above which the matrix unit bounds a matmul.
        vector_ridge: FLOP/byte above which the vector unit bounds elementwise work.
        source: The source of both figures.
    """

    matrix_ridge: float
    vector_ridge: float
    origin: Origin
    source: str

    def is_compute_bound(self, matrix_flops: float, vector_flops: float, moved: float) -> bool:
        """Return whether arithmetic takes longer than moving the bytes."""
        return max(matrix_flops / self.matrix_ridge, vector_flops / self.vector_ridge) >= moved


def roof_of(track: DeviceTrack, device_kind: str) -> Roof:
    """Return the roofline of a track's device, from the most reliable source.

    Args:
        track: The device's ops and properties.
        device_kind: The device's name in jax, where known.
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
    """Return the roofline from the driver's properties, which the profiler records."""
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
    """Return the roofline from the peaks that the runtime recorded; None without them."""
    peak = track.properties.get("peak_teraflops_per_second")
    rate = track.properties.get("peak_hbm_bw_gigabytes_per_second")
    if not isinstance(peak, int | float) or not isinstance(rate, int | float) or not peak * rate:
        return None
    ridge = peak * 1e3 / rate
    return Roof(ridge, VECTOR_SHARE * ridge, "datasheet", "peaks that the runtime recorded")


def _usual_roof(ridge: float, words: str) -> Roof:
    return Roof(ridge, VECTOR_SHARE * ridge, "model", f"{ridge:g} FLOP/byte, {words}")


KINDS = ("compute", "memory", "communication", "input", "overhead")
COMPUTE, MEMORY, COMMUNICATION, INPUT, OVERHEAD = KINDS
MEANINGS = {
    COMPUTE: "ops that wait for the matrix or vector unit",
    MEMORY: "ops that wait for the device's memory",
    COMMUNICATION: "waiting for other devices, with nothing else to do",
    INPUT: "waiting for the host: the next batch, copies from and to its memory, callbacks",
    OVERHEAD: "starting programs and ops, running loops: gaps while a program runs",
}
# How a verdict was reached, the most reliable first.
BY_INTENSITY, BY_OPCODE, BY_NAME = "intensity", "opcode", "name"

_NCCL = re.compile(r"[nr]ccl", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_HOST_COPY = re.compile(r"Memcpy\s?(H2D|D2H|HtoD|DtoH)|infeed|outfeed", re.IGNORECASE)
_PRODUCT_KERNEL = re.compile(
    r"gemm|conv|nvjet|cutlass|xmma|fmha|flash|attention|matmul|dot|^sm\d+_|ampere_|hopper_",
    re.IGNORECASE,
)
# "%all-reduce.3 = f32[8] all-reduce(...)": a TPU names an op by its full text.
_OPCODE = re.compile(r"= (?:\([^()]*\)|\S+) ([a-z][\w\-]*)\(")
_NUMBER = re.compile(r"[.\d]+$")
_CONTROL_NAMES = ("while", "conditional", "call", "command_buffer")


@dataclass(frozen=True)
class Judged:
    """What bounds an op.

    Attributes:
        kind: One of `KINDS`.
        by: "intensity" (FLOPs and bytes against the roof), "opcode" or "name".
        facts: The op's facts from its program; None where that was not recorded.
    """

    kind: str
    by: str
    facts: OpFacts | None = None

    @property
    def is_control(self) -> bool:
        """Whether the op only runs other ops."""
        return self.kind == OVERHEAD


def judge(event: OpEvent, host: HostRecording, roof: Roof) -> Judged:
    """Determine what bounds an op.

    Args:
        event: One run of the op.
        host: The recording, which may contain the op's program.
        roof: The roofline of its device.
    """
    if _NCCL.match(event.kernel):
        return Judged(COMMUNICATION, BY_NAME, _facts(event, host))
    if _HOST_COPY.search(event.kernel):
        return Judged(INPUT, BY_NAME)
    facts = _facts(event, host)
    return _by_name(event) if facts is None else _by_program(facts, event, roof)


def is_beside_the_core(event: OpEvent) -> bool:
    """Return whether a GPU runs the op on another stream: NCCL, a copy from or to the host."""
    return bool(_NCCL.match(event.kernel) or _HOST_COPY.match(event.kernel))


def _facts(event: OpEvent, host: HostRecording) -> OpFacts | None:
    program = host.program_of(event)
    if program is None:
        return None
    facts = program.facts(event.name) if event.name else None
    if facts is None or facts.is_control:
        # A kernel inside a captured graph has the name of the graph's op, or none.
        return program.facts_of_kernel(event.kernel) or facts
    return facts


def _by_program(facts: OpFacts, event: OpEvent, roof: Roof) -> Judged:
    if facts.collective:
        return Judged(COMMUNICATION, BY_OPCODE, facts)
    if facts.is_host:
        return Judged(INPUT, BY_OPCODE, facts)
    if facts.is_control:
        # An event with a kernel's own name does work; the loop or call around it does not.
        own = event.own_name != event.name
        return _by_name(event) if own else Judged(OVERHEAD, BY_OPCODE, facts)
    if facts.matrix_flops is not None and facts.moved_bytes:
        bound = roof.is_compute_bound(facts.matrix_flops, facts.vector_flops, facts.moved_bytes)
        return Judged(COMPUTE if bound else MEMORY, BY_INTENSITY, facts)
    if facts.opcode == "custom-call" or facts.is_product:
        return Judged(COMPUTE, BY_OPCODE, facts)
    return Judged(MEMORY, BY_OPCODE, facts)


def _by_name(event: OpEvent) -> Judged:
    """Judge without a program, by the opcode in the op's text or the name of op or kernel."""
    match = _OPCODE.search(event.kernel)
    opcode = match[1] if match else _NUMBER.sub("", event.kernel or event.name)
    plain = opcode.removesuffix("-done")
    if kind_of(plain) or plain in ("send", "recv") or _COLLECTIVE.search(opcode):
        return Judged(COMMUNICATION, BY_OPCODE if match else BY_NAME)
    if plain in ("infeed", "outfeed"):
        return Judged(INPUT, BY_OPCODE)
    if plain in _CONTROL_NAMES:
        return Judged(OVERHEAD, BY_OPCODE)
    if _PRODUCT_KERNEL.search(event.kernel) or plain in ("dot", "convolution", "custom-call"):
        return Judged(COMPUTE, BY_OPCODE if match else BY_NAME)
    return Judged(MEMORY, BY_OPCODE if match else BY_NAME)
