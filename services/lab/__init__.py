"""Offline work, without NATS or a GPU: the production decisions on a virtual clock, over a recorded journal, or over
what prompts have in common."""
