"""The output directory of one run: its lock and what an earlier run left in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vit.evaluation.predictions import PREDICTIONS_FILE
from vit.model.find_file import MODEL_FILE
from vit.runtime.console import echo
from vit.runtime.files import TEMPORARIES, remove
from vit.runtime.locks import lock_file
from vit.training.metrics_file import METRICS_FILE

CONFIG_FILE = "config.yaml"
_LOCK_FILE = ".lock"
FIRST_BATCH_FILE = "first_batch.png"
CURVE_FILE = "learning_curve.json"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
# the runs of --folds, until the run ends
FOLDS = "folds"
# Measurements of a run. A run that starts anew in its directory removes them.
_RESULT_FILES = (METRICS_FILE, TENSORBOARD, PREDICTIONS_FILE, CURVE_FILE, FOLDS)
# Files that a run writes and --overwrite removes. Other files in the directory stay. The
# configuration comes last: without it the others would not be known as a run's.
_RUN_FILES = (*_RESULT_FILES, MODEL_FILE, CHECKPOINTS, FIRST_BATCH_FILE, CONFIG_FILE)


@contextmanager
def open_run_directory(path: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Create and lock a directory for one run, for as long as the context lasts. `resume` and
    `overwrite` allow a run that is there.

    Raises FileExistsError if it holds something that may not be touched, or is a file; ValueError
    if another process trains into it.
    """
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    refusal = f"another process is training into {path}; wait for it or choose another --output"
    with lock_file(path / _LOCK_FILE, refusal=refusal):
        holds_run = (path / CONFIG_FILE).exists()
        if holds_run and not overwrite and not resume:
            raise FileExistsError(
                f"{path} already holds a run; continue it with --resume, or replace it with"
                " --overwrite"
            )
        # A run can go on from its checkpoints alone, and a job's log may lie there.
        if not holds_run and not (resume and (path / CHECKPOINTS).exists()):
            ours = [path / _LOCK_FILE, path / FIRST_BATCH_FILE, *path.glob(TEMPORARIES)]
            foreign = {entry.name for entry in set(path.iterdir()).difference(ours)}
            if resume:
                foreign.intersection_update(_RUN_FILES)
            if foreign:
                raise FileExistsError(
                    f"{path} holds {min(foreign)}, which is not part of a run; choose another"
                    " --output"
                )
        # A run that was killed has left them; nobody else writes here.
        for folder in (path, path / CHECKPOINTS):
            for temporary in folder.glob(TEMPORARIES):
                remove(temporary)
        try:
            yield
        except BaseException:
            # A run that fails at once leaves no directory.
            if is_new and {entry.name for entry in path.iterdir()} <= {_LOCK_FILE}:
                remove(path)
            raise


def clear_run_directory(path: Path, *, overwrite: bool) -> None:
    """Remove the run that is overwritten, otherwise what an earlier one has measured; its model
    file stays until there is a new one."""
    if (path / CONFIG_FILE).exists() and not overwrite:
        echo(f"{path} holds no checkpoint; the run starts anew", err=True)
    for name in _RUN_FILES if overwrite else _RESULT_FILES:
        remove(path / name)
