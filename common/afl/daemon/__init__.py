"""What both daemons share: logs and events, pages over HTTP, file descriptors, points of failure."""
