"""The best model is the one by the measure that was asked for."""

import pytest

from vit.training.plan import Progress


def measures(loss: float, top1: float, macro_f1: float) -> dict[str, float]:
    return {"loss": loss, "top1": top1, "macro_f1": macro_f1}


@pytest.mark.parametrize(
    ("select_by", "better", "worse"),
    [
        ("top1", measures(9.0, 0.6, 0.0), measures(0.1, 0.4, 1.0)),
        ("top1", measures(0.9, 0.5, 0.0), measures(1.1, 0.5, 1.0)),
        ("macro_f1", measures(9.0, 0.0, 0.6), measures(0.1, 1.0, 0.4)),
    ],
)
def test_the_measure_decides_and_the_loss_breaks_ties(
    select_by: str, better: dict[str, float], worse: dict[str, float]
) -> None:
    progress = Progress(step=1)
    assert progress.record_best(measures(1.0, 0.5, 0.5), select_by=select_by)
    progress.step = 2
    assert not progress.record_best(worse, select_by=select_by)
    assert progress.best_step == 1
    assert progress.record_best(better, select_by=select_by)
    assert (progress.best_step, progress.best) == (2, better)
