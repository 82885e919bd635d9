"""The algorithm, pure: no input or output, no clock, no randomness but the run's own."""
