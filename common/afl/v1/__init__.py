"""Generated from `proto/afl/v1`; written by `make proto`, never by hand."""
