"""A model as one flat vector, and its buffers."""
