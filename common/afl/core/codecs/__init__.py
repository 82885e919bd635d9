"""Compressed vectors as bytes: a codec for each form on the wire, and the coding of indices."""
