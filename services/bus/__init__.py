"""What every service shares: subjects, messages, namespaces and keys, the connection, the runtime, the config."""
