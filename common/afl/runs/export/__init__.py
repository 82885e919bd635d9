"""A run's model handed over: written with a card, optionally as a program, and loaded again."""
