"""The probabilities that outlast the epochs are of epochs that their images did not choose."""

import numpy as np
import torch

from vit.evaluation.metrics import Scores, score_logits
from vit.factory.validation import HeldAside

# the first two images are one half, the last two the other
DIGESTS = np.array([0, 2, 1, 3], dtype=np.uint64)
LABELS = np.zeros(4, dtype=np.int64)


def make_scores(*probabilities: float) -> Scores:
    """Of two classes, of which the first is right."""
    right = np.array(probabilities)
    logits = np.log(np.stack([right, 1 - right], axis=1)).astype(np.float32)
    return score_logits(logits, LABELS)


def test_each_half_has_the_probabilities_of_the_epoch_that_the_other_half_chooses() -> None:
    held_aside = HeldAside("top1")
    held_aside.update(make_scores(0.6, 0.4, 0.3, 0.3), DIGESTS)
    np.testing.assert_allclose(held_aside.probabilities, [0.6, 0.4, 0.3, 0.3], rtol=1e-6)

    # better by the first half alone: the second half's are taken, though they are worse
    held_aside.update(make_scores(0.7, 0.8, 0.1, 0.2), DIGESTS)
    np.testing.assert_allclose(held_aside.probabilities, [0.6, 0.4, 0.1, 0.2], rtol=1e-6)

    # better by the second half alone
    held_aside.update(make_scores(0.1, 0.2, 0.9, 0.9), DIGESTS)
    np.testing.assert_allclose(held_aside.probabilities, [0.1, 0.2, 0.1, 0.2], rtol=1e-6)

    # by neither
    held_aside.update(make_scores(0.5, 0.5, 0.4, 0.4), DIGESTS)
    np.testing.assert_allclose(held_aside.probabilities, [0.1, 0.2, 0.1, 0.2], rtol=1e-6)


def test_a_checkpoint_brings_them_back() -> None:
    before = HeldAside("loss")
    before.update(make_scores(0.6, 0.4, 0.3, 0.3), DIGESTS)
    state = before.state_dict()
    after = HeldAside("loss")
    after.load_state_dict(state)
    # what comes later doesn't change what was saved
    for held_aside in (before, after):
        held_aside.update(make_scores(0.9, 0.8, 0.7, 0.6), DIGESTS)
    np.testing.assert_array_equal(before.probabilities, after.probabilities)
    assert before.best == after.best
    torch.testing.assert_close(
        state["probabilities"], torch.tensor([0.6, 0.4, 0.3, 0.3]).double(), atol=1e-6, rtol=0
    )


def test_images_that_are_all_in_one_half_choose_for_themselves() -> None:
    held_aside = HeldAside("macro_f1")
    held_aside.update(make_scores(0.6, 0.4, 0.3, 0.3), np.zeros(4, dtype=np.uint64))
    assert (held_aside.probabilities > 0).all()
