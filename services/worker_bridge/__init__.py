"""One process in front of one engine."""
