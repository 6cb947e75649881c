"""Summarise what each class is recognised by, and look for shortcuts."""
