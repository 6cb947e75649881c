"""Measure accuracy on damaged images."""
