"""Matrices in integers and fp8, by qwix and by GPTQ."""
