"""Fixtures of the core's tests that tests of exports and the server use."""

from tests.browser import browser, named_bundle

__all__ = ["browser", "named_bundle"]
