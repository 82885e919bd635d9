"""The run directory: its records, checkpoints, and the log of outcomes."""
