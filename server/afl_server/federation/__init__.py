"""The run between its workers: what is known of it at a moment, without a clock, a socket or a file."""
