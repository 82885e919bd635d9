"""Rounds: which step is open, whose reports it takes, and what follows."""
