"""Optimizer steps through the offline TPU compiler, under document 004's names."""

from .compiler import OptimizedGraph as OptimizedGraph
from .compiler import OptimizerConfig as OptimizerConfig
from .compiler import XlaCompiler as XlaCompiler
from .flags import OptimizationFlags as OptimizationFlags

__all__ = ["OptimizationFlags", "OptimizedGraph", "OptimizerConfig", "XlaCompiler"]
