"""A stand-in for a vLLM server: same HTTP, same KV events, same cache rules, live or in virtual time."""
