"""Document 004's three switches, as flags that libtpu really has.

All three are on in libtpu by itself, so switching one on adds nothing to what the level sets, and
switching it off turns off what the compiler would do. Which flags those are was found by compiling:
these change programs (see `tests/pods/xla`), dozens of others with promising names do not.
"""

from dataclasses import dataclass
from typing import Any

from ...job.compiler_flags import flags_of
from ...job.sections import CompileSettings
from ...runtime.flags import FlagRegistry, as_compiler_options

OFF: dict[str, dict[str, bool | str]] = {
    # Operations stay apart: no fusion with several results, none into matrix products.
    "enable_fusion": {
        "xla_jf_enable_multi_output_fusion": False,
        "xla_jf_enable_producer_consumer_multi_output_fusion": False,
        "xla_jf_enable_final_priority_fusion": False,
        "xla_jf_conv_input_fusion": False,
        "xla_jf_conv_output_fusion": False,
    },
    # Operands of products stay in the order they were written in, whatever their layouts. It shows
    # where products have operands in several layouts, as attention has; an optimizer's own update,
    # number by number, has one layout and stays the same program.
    "enable_layout_optimization": {
        "xla_tpu_order_dot_after_layout": False,
        "xla_tpu_enable_aggressive_loop_fusion_layout_opt": False,
    },
    # Nothing stays in VMEM from one operation to the next.
    "enable_memory_optimization": {"xla_msa_enable": "false"},
}


@dataclass(frozen=True, kw_only=True)
class OptimizationFlags:
    """What the compiler may do.

    Attributes:
        enable_fusion: Join operations, so that what is between them never goes to memory.
        enable_layout_optimization: Choose how arrays lie in memory by how they are used.
        enable_memory_optimization: Keep arrays in VMEM between operations, and fetch ahead.
    """

    enable_fusion: bool = True
    enable_layout_optimization: bool = True
    enable_memory_optimization: bool = True

    def compiler_options(self, level: int, *, generation: str) -> dict[str, Any]:
        """Return the options of one compile at an optimization level, for a generation of chips.

        Raises:
            FlagError: The installed libtpu does not know one of them.
        """
        registry = FlagRegistry.installed()
        settings = CompileSettings(
            xla_optimization_level=level, enable_xla_fusion=self.enable_fusion
        )
        asked = flags_of(settings, generation=generation)
        flags: dict[str, Any] = {
            name: value for name, value in asked.items() if registry.find(name).compile_option
        }
        for switch, off in OFF.items():
            if not getattr(self, switch):
                flags |= off
        return dict(as_compiler_options(flags, registry=registry))
