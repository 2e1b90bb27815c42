"""model.json as a stranger could alter it."""

import json

from fscil.teachable import folder as model_folder


def rewrite_head(path, change):
    """Alter model.json and make its own hash right again, as a stranger could."""
    data = json.loads((path / "model.json").read_text())
    version = data.pop("format_version")
    data.pop("sha256")
    change(data)
    head = {"format_version": version, "sha256": model_folder._digest_json(data), **data}
    (path / "model.json").write_text(json.dumps(head))
