"""A whole deployment on one machine: keys, NATS configuration, streams, processes."""
