"""What the built-in tasks share: files, downloads, partitions of records among workers, models."""
