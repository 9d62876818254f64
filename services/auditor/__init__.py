"""Who may connect, and who reused what."""
