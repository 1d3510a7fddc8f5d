"""Matrix products of a model in eight bits."""
