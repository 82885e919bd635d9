"""The worker daemon: one or several workers of a run in one process."""
