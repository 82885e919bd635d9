"""A site's own side of a run: what its policy allows, and the log of what left it."""
