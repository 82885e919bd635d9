"""The one connection to the server: gRPC, what this worker shows of itself, and why a connection failed."""
