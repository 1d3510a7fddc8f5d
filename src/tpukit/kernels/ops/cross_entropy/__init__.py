"""Softmax cross-entropy from hidden states that never holds all logits."""
