"""`vit train`: from a configuration to a trained, self-sufficient model file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit.cli.common import Output, is_main_process

if TYPE_CHECKING:
    from vit.build.run import Run

REQUEUE = 75  # EX_TEMPFAIL: stopped by a signal with its state saved; a scheduler may start it again


def train(
    config: Annotated[
        str | None, typer.Argument(help="YAML file or recipe, such as cifar10/cpu; with --resume the run's own")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …, applied to the file")] = None,
    *,
    output: Output,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run that is there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the plan and one batch, then stop")] = False,
) -> None:
    """Train a model. Ctrl-C saves and stops (exit code 75); --resume continues, to the same result bit for bit."""
    from vit import api
    from vit.training.signals import Stopped

    changes = overrides or []
    if config is not None and "=" in config and not Path(config).exists():
        changes, config = [config, *changes], None
    try:
        result = api.train(
            config,
            output=output,
            overrides=changes,
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            on_start=_show_summary,
        )
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None
    if dry_run:
        typer.echo(f"one batch as the model gets it: {output / 'dry_run.png'}", err=True)
    elif is_main_process():
        best = "" if result.best_top1 is None else f"; best validation top-1 {result.best_top1:.2%}"
        text = f"{result.steps} steps in {result.seconds:.0f} s{best}; model: {result.model_path}"
        typer.echo(text, err=True)


def _show_summary(run: "Run", resumed: bool) -> None:
    """What the run will do and cost, before it starts."""
    from rich.console import Console

    from vit.build.summary import list_unreadable, summarize_run
    from vit.cli.common import build_facts_table

    console = Console(stderr=True, highlight=False)
    console.print(build_facts_table(summarize_run(run)))
    for sentence in list_unreadable(run):
        console.print(sentence, soft_wrap=True, markup=False)
    if resumed:
        trainer = run.trainer
        console.print(f"resuming after step {trainer.progress.step} of {trainer.plan.total_steps}")
