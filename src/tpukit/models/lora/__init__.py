"""LoRA: small trained low-rank matrices beside frozen matrices."""
