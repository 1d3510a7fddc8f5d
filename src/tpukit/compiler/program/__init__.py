"""What is compiled: a lowered function, the slice it is for, and the compiler's options."""
