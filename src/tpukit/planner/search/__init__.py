"""Candidates, their scores, and the compiler's word on the best."""
