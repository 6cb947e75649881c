"""`vit train`: from a configuration to a trained, self-sufficient model file."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vit.build.run import Run
    from vit.config import Config

REQUEUE = 75  # EX_TEMPFAIL: stopped by a signal with its state saved; a scheduler may start it again


def train(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; with --resume the run's own by default")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value …, laid over the file")
    ] = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the run")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is there")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and one batch, then stop")
    ] = False,
) -> None:
    """Train a model. Ctrl-C saves and stops (exit code 75); --resume goes on, to the same result bit for bit."""
    from vit.build.run import build_run
    from vit.runtime.processes import join_processes
    from vit.training.loop import Stopped
    from vit.training.run_directory import CONFIG_FILE, open_run_directory

    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    resolved = _resolve(config, overrides or [], output, resume=resume)
    with join_processes(resolved.train.device) as (process, device_name):
        if dry_run:
            output.mkdir(parents=True, exist_ok=True)
            _show_dry_run(
                build_run(resolved, directory=output, process=process, device_name=device_name), output
            )
            return
        with open_run_directory(output, resume=resume, overwrite=overwrite, is_main=process.is_main):
            run = build_run(resolved, directory=output, process=process, device_name=device_name)
            resumed = resume and run.trainer.resume()
            if process.is_main:
                _write_config(resolved, output / CONFIG_FILE)
                _show_summary(run, resumed_at=run.trainer.progress.step if resumed else None)
            try:
                run.trainer.run()
            except Stopped as stopped:
                typer.echo(str(stopped), err=True)
                raise typer.Exit(REQUEUE) from None
            if process.is_main:
                _show_end(run, output)


def _resolve(config: Path | None, overrides: list[str], output: Path, *, resume: bool) -> "Config":
    """The configuration of the run; of the one in `output` where that is to be continued."""
    from vit.build.run import find_changes
    from vit.config import load_config
    from vit.training.run_directory import CONFIG_FILE

    if config is not None and "=" in config.name and not config.exists():
        config, overrides = None, [str(config), *overrides]
    saved = output / CONFIG_FILE
    if not (resume and saved.exists()):
        if config is None:
            raise ValueError("which configuration? vit train CONFIG.yaml [key.path=value …] --output DIR")
        return load_config(config, overrides)
    resolved = load_config(config or saved, overrides)
    changed = find_changes(resolved, saved)
    if changed:
        raise ValueError(
            f"--resume continues the run of {saved}, but {', '.join(changed)} differ; resume without them or start "
            "another run"
        )
    return resolved


def _write_config(config: "Config", path: Path) -> None:
    from vit.config import dump_config
    from vit.runtime.files import write_text

    if not path.exists():
        write_text(path, dump_config(config))


def _show_summary(run: "Run", *, resumed_at: int | None) -> None:
    """What the run will do and cost, before it starts."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _summarize(run).items():
        table.add_row(f"[bold]{name}", value)
    console = Console(stderr=True, highlight=False)
    console.print(table)
    for dataset in (run.data.train, run.data.validation):
        for name, reason in dataset.unreadable if dataset else ():
            console.print(
                f"skipped {dataset.split if dataset else ''} image {name}: {reason}",
                soft_wrap=True,
                markup=False,
            )
    if resumed_at is not None:
        console.print(f"resuming after step {resumed_at} of {run.trainer.plan.total_steps}")


def _summarize(run: "Run") -> dict[str, str]:
    import torch

    from vit.model.presets import compute_flops
    from vit.runtime.device import choose_precision, describe_device

    plan, data, train = run.trainer.plan, run.data, run.config.train
    precision = choose_precision(train.precision, run.device)
    steps = len(run.train_loader)
    flops = (
        3 * compute_flops(run.model.architecture) * steps * plan.batch_size
    )  # backward costs twice the forward
    counts = [f"{len(data.train):,} training"]
    if data.validation is not None:
        counts.append(f"{len(data.validation):,} validation")
    unreadable = sum(len(dataset.unreadable) for dataset in (data.train, data.validation) if dataset)
    if unreadable:
        counts.append(f"{unreadable} unreadable and skipped")
    full = math.prod(data.preprocess.image_size)  # a step's time goes with its pixels
    sizes = [plan.image_size(epoch) for epoch in range(run.trainer.progress.epoch, plan.epochs)]
    share = sum(math.prod(size) / full if size else 1 for size in sizes) / max(len(sizes), 1)
    cost, estimate = run.step_cost, "none for a sharded model"
    if cost is not None:
        minutes = share * cost.seconds * (plan.total_steps - run.trainer.progress.step) / 60
        estimate = f"{minutes:.1f} minutes, {cost.memory_bytes / 2**20:,.0f} MiB beside the images"
    return {
        "data": f"{data.train.name}: {', '.join(counts)}; {len(data.train.class_names)} classes",
        "fingerprint": data.train.fingerprint[:16],
        "pipeline": f"{data.pipeline} ({data.pipeline_reason})",
        "model": f"{sum(p.numel() for p in run.model.parameters()):,} parameters, {flops / 1e12:,.2f} TFLOP an epoch",
        "device": f"{describe_device(run.device)}, {torch.get_num_threads()} threads, {precision}, "
        f"{'compiled' if run.is_compiled else 'not compiled'}",
        "run": f"{plan.epochs} epochs of {steps} steps of {plan.batch_size} images, {plan.total_steps:,} steps in all",
        "estimate": estimate,
    }


def _show_end(run: "Run", output: Path) -> None:
    from rich.console import Console

    progress = run.trainer.progress
    best = f"; best validation top-1 {progress.best_top1:.2%}" if run.data.validation is not None else ""
    Console(stderr=True, highlight=False).print(
        f"{progress.step} steps in {progress.elapsed_seconds:.0f} s{best}; model: {output / 'model.safetensors'}",
        soft_wrap=True,
    )


def _show_dry_run(run: "Run", output: Path) -> None:
    """The summary, and one augmented batch as a picture."""
    from torchvision.utils import save_image

    from vit.build.attention_images import undo_normalization

    _show_summary(run, resumed_at=None)
    batch = next(iter(run.train_loader.epoch(0)))
    picture = output / "dry_run.png"
    save_image(undo_normalization(batch.images[:64], run.data.preprocess), picture, nrow=8)
    typer.echo(f"one batch as the model sees it: {picture}", err=True)
