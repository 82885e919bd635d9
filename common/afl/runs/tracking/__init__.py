"""Experiment trackers: what a run's metrics are also told to, besides ``metrics.jsonl``."""
