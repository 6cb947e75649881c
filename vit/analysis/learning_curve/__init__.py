"""Estimate how accuracy grows with more images."""
