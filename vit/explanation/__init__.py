"""Attention maps: which parts of an image a vision transformer's answer came from."""
