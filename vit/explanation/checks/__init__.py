"""Tests of whether a map is faithful to the model."""
