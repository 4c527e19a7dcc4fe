"""Bytes: what lies in a checkpoint, read and checked, whatever its container and dialect."""
