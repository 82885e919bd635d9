"""Who may speak for which workers, and the certificates and tokens that show it."""
