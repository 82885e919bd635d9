"""``afl inspect``: what a run's files hold."""
