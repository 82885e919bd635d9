"""Frames: the protocol's messages as bytes, what they may contain, and an exact count of what travels."""
