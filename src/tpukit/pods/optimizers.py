"""Optimizers by the names of document 004; optax's own, and any of optax does as well."""

from optax import adam as Adam

__all__ = ["Adam"]
