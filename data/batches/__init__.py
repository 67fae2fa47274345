"""Examples as tensors: packed rows, collation, seeded and resumable order."""
