"""Tokens: one token axis on the host."""
