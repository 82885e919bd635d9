"""The server daemon: one run of agnostic federated learning."""
