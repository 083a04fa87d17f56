"""Checking: what a token file holds, whether it is right, how fast it is, and what a step trained on."""
