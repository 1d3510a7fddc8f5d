"""Candidates, their scores, and verification of the best by the compiler."""
