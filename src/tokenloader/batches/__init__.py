"""Batches: what the device makes of a block of tokens."""
