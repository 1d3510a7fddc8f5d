"""What runs in the user's process while a program is captured; needs jax and nothing else."""
