"""Several pods that train one model: meshes over them, sums between them, pods that get lost."""
