"""How the commands speak with a person: options, failures, live progress."""
