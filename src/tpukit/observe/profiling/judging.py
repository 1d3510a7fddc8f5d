"""What bounds one op: by the program where it was recorded, else by opcode, else by its name."""

import re
from dataclasses import dataclass

from ...compiler.hlo.collectives import kind_of
from .programs import OpFacts
from .recording import HostRecording, OpEvent
from .roofs import Roof

KINDS = ("compute", "memory", "communication", "input", "overhead")
COMPUTE, MEMORY, COMMUNICATION, INPUT, OVERHEAD = KINDS
MEANINGS = {
    COMPUTE: "ops that wait for the matrix or vector unit",
    MEMORY: "ops that wait for the device's memory",
    COMMUNICATION: "waiting for other devices, nothing else to do meanwhile",
    INPUT: "waiting for the host: the next batch, copies from and to its memory, callbacks",
    OVERHEAD: "starting programs and ops, running loops: gaps while a program is under way",
}
# How a verdict was reached, the surest first.
BY_INTENSITY, BY_OPCODE, BY_NAME = "intensity", "opcode", "name"

_NCCL = re.compile(r"[nr]ccl", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_HOST_COPY = re.compile(r"Memcpy\s?(H2D|D2H|HtoD|DtoH)|infeed|outfeed", re.IGNORECASE)
_PRODUCT_KERNEL = re.compile(
    r"gemm|conv|nvjet|cutlass|xmma|fmha|flash|attention|matmul|dot|^sm\d+_|ampere_|hopper_",
    re.IGNORECASE,
)
# "%all-reduce.3 = f32[8] all-reduce(...)": a TPU names an op by its whole text.
_OPCODE = re.compile(r"= (?:\([^()]*\)|\S+) ([a-z][\w\-]*)\(")
_NUMBER = re.compile(r"[.\d]+$")
_CONTROL_NAMES = ("while", "conditional", "call", "command_buffer")


@dataclass(frozen=True)
class Judged:
    """What bounds an op.

    Attributes:
        kind: One of `KINDS`.
        by: "intensity" (FLOPs and bytes against the roof), "opcode" or "name".
        facts: What the program says of the op; None where it was not recorded.
    """

    kind: str
    by: str
    facts: OpFacts | None = None

    @property
    def is_control(self) -> bool:
        """Whether it only runs other ops."""
        return self.kind == OVERHEAD


def judge(event: OpEvent, host: HostRecording, roof: Roof) -> Judged:
    """Say what bounds an op.

    Args:
        event: One run of it.
        host: The recording, which may hold its program.
        roof: Of the device it ran on.
    """
    if _NCCL.match(event.kernel):
        return Judged(COMMUNICATION, BY_NAME, _facts(event, host))
    if _HOST_COPY.search(event.kernel):
        return Judged(INPUT, BY_NAME)
    facts = _facts(event, host)
    return _by_name(event) if facts is None else _by_program(facts, event, roof)


def is_beside_the_core(event: OpEvent) -> bool:
    """Whether a GPU runs it on a stream of its own: NCCL, a copy from or to the host."""
    return bool(_NCCL.match(event.kernel) or _HOST_COPY.match(event.kernel))


def _facts(event: OpEvent, host: HostRecording) -> OpFacts | None:
    program = host.program_of(event)
    if program is None:
        return None
    facts = program.facts(event.name) if event.name else None
    if facts is None or facts.is_control:
        # A kernel inside a captured graph carries the name of the graph's op, or none.
        return program.facts_of_kernel(event.kernel) or facts
    return facts


def _by_program(facts: OpFacts, event: OpEvent, roof: Roof) -> Judged:
    if facts.collective:
        return Judged(COMMUNICATION, BY_OPCODE, facts)
    if facts.is_host:
        return Judged(INPUT, BY_OPCODE, facts)
    if facts.is_control:
        # What carries a kernel's own name does work; the loop or call around it does not.
        own = event.own_name != event.name
        return _by_name(event) if own else Judged(OVERHEAD, BY_OPCODE, facts)
    if facts.matrix_flops is not None and facts.moved_bytes:
        bound = roof.is_compute_bound(facts.matrix_flops, facts.vector_flops, facts.moved_bytes)
        return Judged(COMPUTE if bound else MEMORY, BY_INTENSITY, facts)
    if facts.opcode == "custom-call" or facts.is_product:
        return Judged(COMPUTE, BY_OPCODE, facts)
    return Judged(MEMORY, BY_OPCODE, facts)


def _by_name(event: OpEvent) -> Judged:
    """Without a program: the opcode in the op's text, else the name of op or kernel."""
    found = _OPCODE.search(event.kernel)
    opcode = found[1] if found else _NUMBER.sub("", event.kernel or event.name)
    plain = opcode.removesuffix("-done")
    if kind_of(plain) or plain in ("send", "recv") or _COLLECTIVE.search(opcode):
        return Judged(COMMUNICATION, BY_OPCODE if found else BY_NAME)
    if plain in ("infeed", "outfeed"):
        return Judged(INPUT, BY_OPCODE)
    if plain in _CONTROL_NAMES:
        return Judged(OVERHEAD, BY_OPCODE)
    if _PRODUCT_KERNEL.search(event.kernel) or plain in ("dot", "convolution", "custom-call"):
        return Judged(COMPUTE, BY_OPCODE if found else BY_NAME)
    return Judged(MEMORY, BY_OPCODE if found else BY_NAME)
