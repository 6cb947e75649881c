"""Measure how faithful map methods are to the model."""
