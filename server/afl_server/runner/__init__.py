"""The event loop around the federation: clock, timers, threads, signals; start-up and shutdown."""
