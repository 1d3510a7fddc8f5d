"""Which attention a model runs, and how a kernel is placed on a mesh."""
