"""Curves of runs in the paper's three views: update rounds, synchronization rounds, communication."""
