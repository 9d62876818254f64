"""What several suites start or fake. `tests/` is on the path of all of them: `from support.nats import NatsServer`."""
