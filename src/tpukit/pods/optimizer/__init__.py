"""An optax optimizer on the devices of a pod: tensors, gradients, steps and resizing."""
