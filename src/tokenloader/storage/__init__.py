"""Storage: who holds the bytes."""
