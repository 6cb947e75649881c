"""Documents that commands write against the published schemas."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.conftest import ROOT

SCHEMAS = ROOT / "docs" / "reference" / "schemas"


def check_document(name: str, document: Any) -> Any:
    """Return a document that the schema of this name takes, and that has no key but the described
    ones. Raises jsonschema's ValidationError."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    for part in (*schema.get("$defs", {}).values(), schema):
        if "properties" in part:
            part["additionalProperties"] = False
    Draft202012Validator(schema).validate(document)
    return document
