"""The theorems, the exact risks of the synthetic task, and how stationary a model of it is."""
