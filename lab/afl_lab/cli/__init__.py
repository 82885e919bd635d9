"""The lab's subcommands of ``afl``, found through the entry point group ``afl.commands``."""
