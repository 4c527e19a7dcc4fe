"""The engine: picks, runs and accepts; serves many requests at once."""
