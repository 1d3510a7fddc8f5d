"""Why a step is slow: what bounds it, by the compiler's schedule or by measuring."""
