"""The section that a product adds to the report: the product's "report section" returns it."""

from pathlib import Path
from typing import NamedTuple


class Section(NamedTuple):
    """A section of the report.

    Attributes:
        anchor: Its id in the page.
        title: Its name in the navigation.
        html: Its content, already escaped; empty: only the sentence is shown.
        sentence: One more sentence at the top of the report.
    """

    anchor: str
    title: str
    html: str
    sentence: str


def find_run(model: str) -> Path | None:
    """Return the run that a model file lies in; None for a model without a file."""
    if model.startswith("timm:"):
        return None
    return Path(model) if Path(model).is_dir() else Path(model).parent
