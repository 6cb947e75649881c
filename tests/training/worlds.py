"""Several processes of one run without torchrun: children of a server that has imported everything,
so that a process costs a fraction of a second."""

import functools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def start_world(target: Callable[..., None], *arguments: Any, size: int) -> list[BaseProcess]:
    """target(*arguments) in each of `size` processes, with the environment that torchrun would give
    them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "vit.training.train_model",
            "vit.cli.main",
            "torch.utils.tensorboard",
            "sklearn.datasets",
        ]
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "VIT_CACHE": os.environ["VIT_CACHE"],
    }
    started: list[BaseProcess] = []
    for rank in range(size):
        environment = {
            key: str(value) for key, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        run = functools.partial(
            _run, environment if size > 1 else {"VIT_CACHE": environment["VIT_CACHE"]}, target
        )
        started.append(context.Process(target=run, args=arguments))
        started[-1].start()
    return started


def join_world(processes: list[BaseProcess], *, timeout: float = 120) -> list[int | None]:
    """The exit codes, once all have ended; None of one that has not."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_command(directory: Path, *arguments: str) -> None:
    """`vit train …` into `directory`, what it says in RANK.txt beside it."""
    rank = os.environ.get("RANK", "0")
    descriptor = os.open(directory.parent / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    from vit.cli.main import main

    main(["train", *arguments, "--output", str(directory)])


def _run(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    target(*arguments)
