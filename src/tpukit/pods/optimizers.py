"""Optimizers under the names of document 004; any other optax optimizer works as well."""

from optax import adam as Adam

__all__ = ["Adam"]
