"""Which worker holds which block, from the workers' own events."""
