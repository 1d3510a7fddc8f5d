"""Configurations and weights of Hugging Face models."""
