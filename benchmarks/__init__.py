"""Benchmarks: programs that each answer one question and write benchmarks/results/NAME.json."""
