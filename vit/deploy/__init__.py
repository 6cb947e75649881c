"""Models for other programs and people."""
