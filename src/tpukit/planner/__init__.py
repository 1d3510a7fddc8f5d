"""Choose a slice, a mesh and a batch from a model, tokens, a deadline and a budget."""
