"""Low-rank adapters (LoRA): a few trained numbers beside matrices that stay as they are."""
