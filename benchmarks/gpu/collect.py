"""Put what the parts of gpu_day.sh measured into one result file, gpu-<machine>.json.

    python benchmarks/gpu/collect.py FOLDER --device cuda --output benchmarks/results

FOLDER has a line for each part in parts.jsonl, and what a part measured in NAME.json.
"""

import argparse
import json
from pathlib import Path

from conditions import describe_conditions, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    parts = {}
    for line in (options.folder / "parts.jsonl").read_text().splitlines():
        part = json.loads(line)
        name = part.pop("name")
        measured = options.folder / f"{name}.json"
        parts[name] = part
        if measured.exists():
            parts[name]["result"] = json.loads(measured.read_text())
    machine = describe_conditions(options.device)
    print(write_result(options.output, "gpu", {"machine": machine, "parts": parts}))


if __name__ == "__main__":
    main()
