"""The loader: batches in time, by a cursor, a thread and a device."""
