"""The decoder: parts, executors and the handoff, assembled from a spec."""
