"""Measuring: paired, interleaved timing that states its own noise."""
