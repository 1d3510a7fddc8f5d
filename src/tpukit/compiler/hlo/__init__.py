"""Readers for the compiler's output: programs, shapes, loops, collectives."""

from .collectives import Collective as Collective
from .collectives import count_collectives as count_collectives
from .collectives import find_collective as find_collective
from .flops import count_operations as count_operations
from .flops import matrix_flops as matrix_flops
from .flops import nested_matrix_flops as nested_matrix_flops
from .flops import open_loop as open_loop
from .flops import trip_count as trip_count
from .module import Computation as Computation
from .module import HloModule as HloModule
from .module import Instruction as Instruction
from .module import parse_hlo as parse_hlo
from .shape import Shape as Shape
from .shape import parse_shapes as parse_shapes

__all__ = [
    "Collective",
    "Computation",
    "HloModule",
    "Instruction",
    "Shape",
    "count_collectives",
    "count_operations",
    "find_collective",
    "matrix_flops",
    "nested_matrix_flops",
    "open_loop",
    "parse_hlo",
    "parse_shapes",
    "trip_count",
]
