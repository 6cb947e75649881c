"""Fixtures of the core's tests that tests of products use."""

from tests.browser import browser
from tests.evaluation.conftest import bundle, images, make_evaluation, make_predictions
from tests.explanation.conftest import build, from_timm, ours, trained

__all__ = [
    "browser",
    "build",
    "bundle",
    "from_timm",
    "images",
    "make_evaluation",
    "make_predictions",
    "ours",
    "trained",
]
