"""Write `sources.yaml`: the paths that the worker of a test's stack may access."""

import json
from pathlib import Path

from tests.e2e.services import ROOT

__all__ = ["DEMO", "write_places"]

DEMO = ROOT / "deployments" / "demo"


def write_places(folder: Path, bucket: str) -> None:
    """Write the names for run forms, and the paths that runs may read and write."""
    raw = f"s3://{bucket}/raw"
    places = {
        "sources": {
            "demo-instructions": f"{raw}/instructions.jsonl",
            "demo-chats": f"{raw}/chats.jsonl",
        },
        "tokenizers": {"demo": str(DEMO / "tokenizer")},
        "stores": {"main": f"s3://{bucket}"},
        "recipes": {
            "demo": str(DEMO / "recipe.yaml"),
            "gsm8k": str(ROOT / "deployments" / "recipes" / "gsm8k.yaml"),
        },
        "allow": {"read": [f"{raw}/"], "write": [f"s3://{bucket}/"]},
    }
    (folder / "sources.yaml").write_text(json.dumps(places, indent=1))  # JSON is YAML
