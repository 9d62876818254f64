"""Request in, keyed tokens out."""
