"""Serve a model over HTTP."""
