"""A search for a run's settings, by the worst worker's value on records that are held out, never on test."""
