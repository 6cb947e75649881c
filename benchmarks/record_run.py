"""Make a row of figures from a training directory and its evaluation.

    python benchmarks/record_run.py RUN EVALUATION --command "vit train …" --output benchmarks/results/NAME.json

The row says what was reached, how long training took, on which machine, by which command, commit and versions.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from vit.bundle import load_bundle
from vit.device import choose_device, describe_device
from vit.files import write_text


def make_row(run: Path, evaluation: Path, *, command: str, note: str) -> dict[str, Any]:
    """The row as plain values."""
    bundle = load_bundle(run)
    figures = json.loads((evaluation / "evaluation.json").read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    if figures["model_sha256"] != bundle.sha256:
        raise SystemExit(f"{evaluation} is of another model than {run}")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    )
    return {
        "test_top1": figures["top1"],
        "interval_95": figures["intervals"]["top1"],
        "num_test_images": figures["num_images"],
        "training_seconds": round(last["elapsed_seconds"]),
        "epochs": last["epoch"],
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "device": describe_device(choose_device("auto")),
        "command": command,
        "commit": commit.stdout.strip(),
        "versions": bundle.metadata["versions"],
        "data": bundle.data,
        "model_sha256": bundle.sha256,
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--command", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    row = make_row(arguments.run, arguments.evaluation, command=arguments.command, note=arguments.note)
    write_text(arguments.output, json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
