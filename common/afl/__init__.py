"""Agnostic federated learning: what users import."""
