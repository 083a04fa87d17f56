"""Formats: which bytes of which files are tokens."""
