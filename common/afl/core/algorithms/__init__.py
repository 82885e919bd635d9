"""Algorithms as pure state machines: a server half, a worker half, and the model copies they move."""
