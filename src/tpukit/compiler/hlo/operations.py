"""What a scheduled program is made of, in a handful of counts that two compilers can be told by."""

from .module import Computation, HloModule
from .shape import reads_program

_RUN_INSIDE = ("while", "conditional", "call")


@reads_program
def count_operations(module: HloModule) -> dict[str, int]:
    """How many fusions, Pallas kernels, loops and copies the program has; a loop's body once.

    What is inside a fusion is one operation of the schedule, and counts as one.
    """
    counts: dict[str, int] = dict.fromkeys(("fusions", "kernels", "loops", "copies"), 0)

    def visit(computation: Computation) -> None:
        for instruction in computation:
            counts["fusions"] += instruction.opcode == "fusion"
            counts["kernels"] += instruction.is_kernel
            counts["loops"] += instruction.opcode == "while"
            counts["copies"] += instruction.opcode in ("copy", "copy-start")
            if instruction.opcode in _RUN_INSIDE:
                for called in module.called_by(instruction):
                    visit(called)

    visit(module.entry)
    return counts
