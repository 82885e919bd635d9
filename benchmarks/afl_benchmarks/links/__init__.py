"""Links of a given rate and delay between a server and its workers, on one machine."""
