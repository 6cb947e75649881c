"""Self-contained pages: one HTML file, autoescaped, that opens from disk with the network off."""

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(template: str, context: Mapping[str, object]) -> str:
    """Fill a template of this folder, which extends `base.html.jinja`, as text for one HTML file.

    Every value is escaped; data for scripts goes through Jinja's `tojson`, which escapes `<` as well.
    A name missing from `context` raises jinja2.UndefinedError.
    """
    environment = Environment(
        loader=PackageLoader("vit", "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(context)
