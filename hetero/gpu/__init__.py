"""Arithmetic: torch twins of every operation, what runs them on the CPU, and the Triton kernels."""
