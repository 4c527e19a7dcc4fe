"""Memory: where every byte lives, planned, kept and measured."""
