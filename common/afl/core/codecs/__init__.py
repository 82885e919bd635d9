"""Codecs: compressed vectors and supports as bytes."""
