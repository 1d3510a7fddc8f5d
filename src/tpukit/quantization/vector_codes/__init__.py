"""Vector-quantized matrices: `VQArray`, and the codec that makes it."""
