"""KV caches in few bits: their codebooks, what they cost, and which one a model bears."""
