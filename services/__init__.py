"""prefixbus: routes LLM requests over NATS to the worker that already holds the KV cache of their prefix."""

__version__ = "0.1.0"
