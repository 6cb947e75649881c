"""The model card of an export: README.md with the header that the Hub reads."""

import re

from jinja2 import Environment, PackageLoader, StrictUndefined

from vit.bundle import Bundle
from vit.data.open import name_data
from vit.evaluation.result import find_evaluation


def build_card(bundle: Bundle, *, format: str, attention: bool) -> str:
    """Build README.md. Text that came with the model or its data is quoted: it may hold markup."""
    environment = Environment(
        loader=PackageLoader("vit", "deploy/export/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quote": _quote, "plain": _plain}
    text = environment.get_template("README.md.jinja").render(
        format=format,
        attention=attention,
        bundle=bundle,
        parameters=sum(parameter.numel() for parameter in bundle.model.parameters()),
        data=name_data(bundle.data.get("name", ""), bundle.config.get("data", {}).get("root")),
        evaluation=find_evaluation(bundle.name, bundle.sha256),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _plain(text: object) -> str:
    """Return one line of Markdown in which nothing is a tag, a link or a heading."""
    one_line = " ".join(str(text).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", one_line)


def _quote(text: object) -> str:
    """Return one line of code in Markdown."""
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"
