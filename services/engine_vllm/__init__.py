"""The real engine: how vLLM is started, and weights for it."""
