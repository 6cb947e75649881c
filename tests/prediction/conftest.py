"""Fixtures of the evaluation's tests that tests of predictions use."""

from tests.evaluation.conftest import bundle, images, make_evaluation, make_predictions

__all__ = ["bundle", "images", "make_evaluation", "make_predictions"]
