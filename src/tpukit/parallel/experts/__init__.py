"""Mixtures of experts: routing, exchange of tokens, placement."""
