"""A run's files: how they are written, what they say, and what is made of them."""
