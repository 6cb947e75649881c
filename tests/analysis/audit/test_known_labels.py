"""A model judges only labels of images that it knows."""

import numpy as np

from vit.analysis.audit.suspects import find_known


def test_labels_are_not_judged_by_a_model_that_does_not_know_them() -> None:
    """Two classes, 60 and 40 images, in groups of ten."""
    labels = np.repeat([0, 1], [60, 40])
    groups = [f"site{number // 10}" for number in range(100)]
    correct = np.ones(100, dtype=bool)
    assert find_known(correct, labels, groups).all()
    # the third site is unknown; a planted error elsewhere is still found
    correct[20:25] = False
    correct[71] = False
    is_known = find_known(correct, labels, groups)
    assert np.flatnonzero(~is_known).tolist() == list(range(20, 30))
    # two errors are no unknown site, however few its images are
    assert find_known(correct, labels, [*groups[:71], "a", "a", *groups[73:]])[71:73].all()
    assert find_known(correct, labels, None).all()
    # always the first class: right on 60 of 100
    assert not find_known(labels == 0, labels, groups).any()
