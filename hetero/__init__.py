"""hetero: run mixture-of-experts models far larger than the graphics card."""

__version__ = "0.1.0"
