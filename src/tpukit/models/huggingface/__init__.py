"""Configurations, weights and chat templates of Hugging Face models."""
