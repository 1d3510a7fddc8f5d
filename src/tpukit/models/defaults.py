"""Sequence lengths that jobs, plans and checks use where the user gives none. Loads no jax."""

TRAINING_SEQUENCE_LENGTH = 2048
# Most published pretraining runs use this length, so plans do where the model can read as much.
PLANNED_SEQUENCE_LENGTH = 8192
# Tokens per sequence, prompt included, that serving plans and decoding checks reserve cache for.
SERVING_CONTEXT = 8192
