"""What nobody may do, asked of a real server."""
