"""The gallery page of explained images."""
