"""`vit predict` over very many files: memory and rows over time, with kills between.

    python benchmarks/predict_many.py PHOTOS --count 100000 --kills 3 --output benchmarks/results

PHOTOS is a folder of image files, to which --count links are made. The command writes --suffix, is ended by SIGKILL
after equal parts of the rows, and is started again with --resume. The result has resident memory and rows every two
seconds, and a chart as SVG beside it; it fails unless each image has one row.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from conditions import ROOT, describe_conditions, write_result

NAME = "predict-many"
_SECONDS = 2.0
_WIDTH, _HEIGHT, _MARGIN = 640, 220, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--model", default="imagenette")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--suffix", default=".jsonl")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        names = make_links(options.photos, place / "links", options.count)
        rows = place / f"rows{options.suffix}"
        points = run(options.model, place / "links", rows, count=options.count, kills=options.kills)
        written = read_paths(rows)
    assert written == names, f"{len(written)} rows, {len(set(written))} different"
    result = {
        "model": Path(options.model).name,
        "images": options.count,
        "suffix": options.suffix,
        "kills": options.kills,
        "rows_each_once": len(written),
        "max_memory_mb": max(point["memory_mb"] for point in points),
        "points": points,
    }
    result["machine"] = describe_conditions("cpu")
    path = write_result(options.output, NAME, result)
    path.with_suffix(".svg").write_text(draw(points, options.count), encoding="utf-8")


def make_links(photos: Path, folder: Path, count: int) -> list[str]:
    """Make links to the photos in turn, 1,000 a folder, and return their paths in order."""
    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".png"))
    names = []
    for number in range(count):
        link = folder / f"{number // 1000:04d}" / f"{number:07d}{files[0].suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(files[number % len(files)].resolve())
        names.append(str(link))
    return names


def run(model: str, photos: Path, rows: Path, *, count: int, kills: int) -> list[dict[str, Any]]:
    """Run the command to its end, with kills; return seconds, rows and memory over time."""
    command = [sys.executable, "-m", "vit", "predict", model, str(photos), "--output", str(rows)]
    points: list[dict[str, Any]] = []
    start = time.perf_counter()
    for part in range(kills + 1):
        process = subprocess.Popen(
            [*command, "--resume", "--device", "cpu"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(_SECONDS)
            done = count_rows(rows)
            try:
                memory = watched.memory_info().rss / 2**20
            except psutil.Error:
                continue
            if memory:
                seconds = round(time.perf_counter() - start, 1)
                points.append({"seconds": seconds, "rows": done, "memory_mb": round(memory, 1)})
            if part < kills and done >= count * (part + 1) // (kills + 1):
                process.kill()
                process.wait()
        assert part < kills or process.returncode == 0
    return points


def count_rows(rows: Path) -> int:
    if not rows.exists():
        return 0
    if rows.is_dir():
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        return sum(pq.read_metadata(part).num_rows for part in rows.glob("part-*.parquet"))
    with rows.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def read_paths(rows: Path) -> list[str]:
    """Return the path of each row."""
    import json

    if rows.is_dir():
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        paths: list[str] = pq.read_table(rows, columns=["path"])["path"].to_pylist()
        return paths
    with rows.open() as file:
        return [json.loads(line)["path"] for line in file]


def draw(points: list[dict[str, Any]], count: int) -> str:
    """Draw memory and rows over time as SVG; a line breaks where the process was killed."""
    end = points[-1]["seconds"]
    most = max(point["memory_mb"] for point in points)

    def place(seconds: float, fraction: float) -> str:
        x = _MARGIN + seconds / end * (_WIDTH - 2 * _MARGIN)
        return f"{x:.1f},{_HEIGHT - _MARGIN - fraction * (_HEIGHT - 2 * _MARGIN):.1f}"

    lines = []
    for name, top, colour in (("rows", count, "#1f77b4"), ("memory_mb", most * 1.2, "#d62728")):
        path = " ".join(place(point["seconds"], point[name] / top) for point in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
    texts = (
        (_MARGIN, 18, f"{count:,} rows at the end", "#1f77b4"),
        (_MARGIN, 34, f"resident memory, at most {most:.0f} MiB", "#d62728"),
        (
            _MARGIN,
            _HEIGHT - 14,
            f"0 to {end:.0f} seconds; where memory falls, the process was killed",
            "#555",
        ),
    )
    lines += [
        f'<text x="{x}" y="{y}" fill="{colour}" font-family="sans-serif" font-size="13">{text}</text>'
        for x, y, text, colour in texts
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    white = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join((head, white, *lines, "</svg>", ""))


if __name__ == "__main__":
    main()
