"""Secure aggregation: masks that cancel in the sum of all workers' messages, and what they are made of."""
