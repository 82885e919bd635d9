"""What the server shows of its run: the status page, /status, /metrics, probes, a terminal's live view."""
