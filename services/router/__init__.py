"""Which worker answers a request, and why."""
