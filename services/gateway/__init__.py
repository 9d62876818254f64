"""The other end of the bus: OpenAI's HTTP interface, for clients that know nothing of NATS."""
