"""Matrix products with weights in int8, int4, fp8 or vector-quantized form."""
