"""The paper's experiments, from a search of step sizes to figures."""
