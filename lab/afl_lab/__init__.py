"""Checks of tasks, simulation, reproduction of the paper, benchmarks."""
