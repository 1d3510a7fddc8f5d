"""Linear attention by the gated delta rule, in chunks and in steps, with its convolution."""
