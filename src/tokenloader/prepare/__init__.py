"""Preparing: text to tokens, and one token file format to another."""
