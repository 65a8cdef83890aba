"""Deploy deployments/prefect.yaml on a test's stack, as an operator would."""

from pathlib import Path
from typing import Any

from tests.e2e.stack import BUCKET, Stack, s3_client
from tests.prepared import DEMO

RAW = f"s3://{BUCKET}/raw"


def deploy(stack: Stack) -> None:
    """Upload the demo's raw files, configure the worker's paths and deploy everything."""
    upload(stack, DEMO / "instructions.jsonl", DEMO / "chats.jsonl")
    done = stack.call("python", "deployments/deploy.py")  # as `make deploy` does
    assert done.returncode == 0, done.stdout + done.stderr


def upload(stack: Stack, *files: Path) -> None:
    """Upload raw files to the bucket, under raw/."""
    client = s3_client(stack.environment)
    try:
        for file in files:
            client.upload_file(str(file), BUCKET, f"raw/{file.name}")
    finally:
        client.close()


def demo_recipe(dataset: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the demo's recipe as a run form sends it, with sections updated by `changes`."""
    recipe = {
        "dataset": dataset,
        "sources": [
            {"path": "demo-instructions", "format": "alpaca"},
            {"path": f"{RAW}/chats.jsonl", "format": "chat"},
        ],
        "tokenizer": "demo",
        "validate": {"max_quarantined": 0.05},
        "pack": {"seq_len": 512},
        "split": {"eval_fraction": 0.1},
        "publish": {"store": "main"},
    }
    for section, values in changes.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    return recipe
