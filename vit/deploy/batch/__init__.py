"""Predictions and maps of any number of images on many machines."""
