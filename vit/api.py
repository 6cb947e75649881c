"""What a person calls from Python."""
