"""One model trained on several pods: meshes over pods, sums between pods, and lost pods."""
