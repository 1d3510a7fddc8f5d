"""From a model, tokens, a deadline and a budget to a slice, a mesh and a batch: `Plan`."""

from .plan import Plan as Plan

__all__ = ["Plan"]
