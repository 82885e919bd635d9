"""gRPC to events and effects to gRPC: listening, TLS, who a peer is, one stream for each session."""
