"""From a model, tokens, a deadline and a budget to a slice, a mesh and a batch."""
