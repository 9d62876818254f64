"""Offline work: the production decisions and the engine's model, run on one virtual clock."""
