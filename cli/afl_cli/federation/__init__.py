"""A whole federation on this machine: ``afl demo`` and ``afl run``."""
