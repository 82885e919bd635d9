"""Benchmarks, and later simulation and reproduction."""
