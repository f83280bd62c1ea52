"""What waits for backward, and where."""
