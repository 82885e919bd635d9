"""A federation in one process, without sockets: the same state machines, bits, and counts of bytes."""
