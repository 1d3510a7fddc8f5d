"""The input of a compile: a lowered function, its slice, and the compiler's options."""
