"""Measure accuracy under image corruptions."""
