"""The tables of the studies in docs/benchmark-record.md and docs/gpu.md, from their result files.

    python research/study_tables.py            # print them
    python research/study_tables.py --write    # into the pages, between their marks
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from tables import join_tables, write_or_print  # noqa: E402

from vit.analysis.faithfulness.map_metrics import to_markdown  # noqa: E402

PATCH_SIZE = 16  # of the models whose growth was measured


def build_class_balance_table(result: dict[str, Any]) -> str:
    """A row for each choice: means over the seeds."""
    titles = {"none": "none", "weights": "class weights in the loss", "sampler": "balanced sampler"}
    rows = []
    for name, mean in result["mean"].items():
        metrics = (mean["macro_f1"], mean["top1"], mean["macro_precision"])
        rows.append([titles[name], *(f"{100 * metric:.1f} %" for metric in metrics)])
    seeds = len(result["runs"]["none"])
    headings = [f"classes of 20:1, seeds: {seeds}", "macro F1", "top-1", "macro precision"]
    return to_markdown(headings, rows)


def build_contention_table(result: dict[str, Any]) -> str:
    """A row for each recipe and division of the work among threads."""
    titles = {"operations": "threads share every operation", "parts": "threads share the batch"}
    rows = []
    for recipe, divisions in result["images_per_second"].items():
        for division, rates in divisions.items():
            cells = [f"{rate:,.0f} ({rate / rates['0']:.0%})" for rate in rates.values()]
            rows.append([recipe, titles[division], *cells])
    table = to_markdown(["recipe", "", "alone", "beside 1 busy process", "beside 2"], rows)
    return f"{table}\n\n{_describe_machine(result)}."


def build_growth_table(result: dict[str, Any]) -> str:
    """A row for each measurement, with its largest point."""

    def format_exponent(row: dict[str, Any], name: str) -> str:
        measured = row["exponents"][name]["measured"]
        theory = row["exponents"][name]["theory"]
        if measured is None:
            return "–"
        is_bound = row["at_most"] and theory > 0
        return f"{measured:.2f} ({'≤ ' if is_bound else ''}{theory:.2f})"

    rows = []
    for name, row in result["rows"].items():
        sizes = [round(point["size"]) for point in row["points"]]
        if row["by"] == "tokens":  # measured by the side of an image
            sizes = [(side // PATCH_SIZE) ** 2 + 1 for side in sizes]
        largest = row["points"][-1]
        memory = f"{largest['bytes'] / 2**20:,.0f} MiB"
        if "file" in largest:
            memory += f"; file {largest['file'] / 1e6:,.1f} MB"
        rows.append(
            [
                name,
                f"{sizes[0]:,} to {sizes[-1]:,} {row['by']}",
                f"{largest['seconds']:.3g} s",
                format_exponent(row, "seconds"),
                memory,
                format_exponent(row, "bytes"),
                row["words"],
            ]
        )
    headings = ["", "from … to", "seconds at the largest", "exponent (theory)", "memory"]
    return to_markdown([*headings, "exponent (theory)", "theory: time; memory"], rows)


def build_own_photos_table(result: dict[str, Any]) -> str:
    """A row for each set of images."""
    rows = []
    for name, measured in result["results"].items():
        low, high = measured["interval"]
        test_top1 = f"{100 * measured['top1']:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
        unseen = measured.get("val folder")
        unseen_top1 = ""
        if unseen:
            unseen_top1 = f"{100 * unseen['top1']:.1f} %, {unseen['images']:,} images"
        reference_name, reference = next(iter(measured["references"].items()))
        seconds = f"; {reference['seconds']:.0f} s" if "seconds" in reference else ""
        rows.append(
            [
                name,
                f"{measured['seconds']:.0f}",
                f"{test_top1}, {measured['images']:,} images",
                unseen_top1,
                f"{100 * reference['top1']:.1f} % ({reference_name}{seconds})",
            ]
        )
    headings = ["images", "seconds", "test top-1", "top-1 on the val folder", "for comparison"]
    return to_markdown(headings, rows)


def build_processes_table(result: dict[str, Any]) -> str:
    """A row for each number of processes."""
    rows = []
    for run in result["runs"]:
        exchanged = ["–", "–", "–", "–"]
        if "calls" in run:
            exchanged = [
                str(sum(run["calls"].values())),
                f"{sum(run['bytes'].values()) / 1e6:.2f}",
                f"{run['sent_bytes'] / 1e6:.2f}",
                f"{run['overlap']:.0%}",
            ]
        rows.append(
            [
                f"{run['processes']}, {run['parallel']}" if run["processes"] > 1 else "1",
                f"{run['loss_difference']:.1e}",
                f"{run['steps_per_second']:.1f}",
                *exchanged,
                f"{run['start_seconds']:.1f}",
                str(run.get("restart_seconds", "–")),
            ]
        )
    headings = ["processes", "loss, largest difference", "steps/s", "calls a step", "MB a step"]
    headings += ["MB sent", "overlap", "start (s)", "restart (s)"]
    load = result["machine"]["load"]
    conditions = f"{_describe_machine(result)}, load {load} at the start; {result['steps']} steps"
    return f"{to_markdown(headings, rows)}\n\n{conditions}."


def build_start_table(result: dict[str, Any]) -> str:
    """A row for each kind and number of images."""
    rows = []
    for row in result["rows"]:
        is_dropped = "" if row["page_cache_dropped"] else " (page cache not dropped)"
        rows.append(
            [
                f"{row['images']:,} {row['kind']}",
                f"{row['cold']['first_step_seconds']:.1f}{is_dropped}",
                f"{row['warm']['first_step_seconds']:.1f}",
                f"{row['scan_seconds']:.1f}",
                f"{row['cold']['main_mib']:.0f}",
                f"{sum(row['cold']['workers_mib']):.0f}",
            ]
        )
    headings = ["images", "first step, s: cold", "warm", "decoding each image once, s"]
    headings += ["main process, MiB", "its processes' own, MiB"]
    return to_markdown(headings, rows)


def build_step_profile_table(result: dict[str, Any]) -> str:
    """A row for each kind of operation, a column for each recipe."""
    recipes = result["recipes"]
    rows = []
    for kind in next(iter(recipes.values()))["milliseconds"]:
        row = [kind]
        for profile in recipes.values():
            share = profile["milliseconds"][kind] / sum(profile["milliseconds"].values())
            row.append(f"{share:.0%}")
        rows.append(row)
    steps = [f"{profile['step']:,.0f}" for profile in recipes.values()]
    rows.append(["milliseconds of a step", *steps])
    return f"{to_markdown(['', *recipes], rows)}\n\n{_describe_machine(result)}."


def build_transfers_table(result: dict[str, Any]) -> str:
    """Copies in / copies out / waits of each case at each commit."""
    versions = result["versions"]
    rows = []
    for case in versions[-1]["cases"]:
        row = [case]
        for version in versions:
            counts = version["cases"][case]
            cell = "fails"
            if "error" not in counts:
                kinds = ("copies in", "copies out", "waits")
                cell = " / ".join(f"{counts[kind]:.3g}" for kind in kinds)
            row.append(cell)
        rows.append(row)
    commits = [version["commit"] for version in versions]
    return to_markdown(["copies in / copies out / waits", *commits], rows)


def _describe_machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['device']}, commit {machine['commit']}"


def build_tables() -> dict[str, str]:
    """Name of the mark → what stands below it."""
    return {
        "class-balance": join_tables(build_class_balance_table, "class-balance"),
        "contention": join_tables(build_contention_table, "contention"),
        "growth": join_tables(build_growth_table, "growth"),
        "own-photos": join_tables(build_own_photos_table, "own-photos"),
        "processes": join_tables(build_processes_table, "processes"),
        "start": join_tables(build_start_table, "start"),
        "step-profile": join_tables(build_step_profile_table, "step-profile"),
        "transfers": join_tables(build_transfers_table, "transfers"),
    }


if __name__ == "__main__":
    write_or_print(build_tables(), description=__doc__)
