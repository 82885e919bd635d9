"""The `afl` command."""
