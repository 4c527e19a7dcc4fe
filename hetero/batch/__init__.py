"""Offline batches: many rows in, one line out for each, whatever happens between."""
