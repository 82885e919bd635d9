"""The files that ``afl new`` writes: each with the ending ``.template``, and placeholders for the names."""
