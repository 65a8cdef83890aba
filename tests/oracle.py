"""Record the results of packhouse for fixed inputs, and compare another commit with them.

    python -m tests.oracle record ../oracle/3d369ff.json --checkout ../checkout-of-3d369ff
    python -m tests.oracle compare tests/golden/oracle.json
    python -m tests.oracle compare ../oracle/3d369ff.json --show alpaca+qwen3

A combination is a recipe with a tokenizer: every recipe of deployments/recipes, the demo, chats
with and without tools, settings that change the result, and the seeds of the fuzzers. The command
line prepares each into a separate store. Each part of the version becomes one digest:

    outcome     exit code of the command
    records     source, row and id of each record, its number of tokens, what happened to it
    splits      which records are train and which are eval, with the keys that decide it
    tokens      ids of each sequence
    labels      labels of each token, and every other column with a value per token
    packs       ids of the records in each pack, in order
    quarantine  source, row, byte and reason of each bad row, and the digest of its raw bytes
    ledger      rows and tokens in and out of each step, and counts by source and split
    audit       counts of the audit

Digests are of values, so names of versions, files and folders may change, and so may the wording
of messages. `record` saves the digested rows as Parquet next to OUT.json (in the folder OUT).

Large files are sampled. A combination takes 2 to 7 s of one core, all of them about 8 minutes.
All except the demo and the fuzzers' seeds need real data and tokenizers (PACKHOUSE_SHARED, or
`shared` next to the checkout).
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.conftest import find_shared
from tests.fuzz.seeds import SEEDS, forged_conversation

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "packhouse", "prepare"]

SAMPLED = {"alpaca_data.json": 1500, "gsm8k_train.jsonl": 600, "sst2_train.tsv": 1500}
"""Number of rows taken from a file, evenly spread."""

NUM_FORGED = 400

SOUND_ROW = {"text": "a", "instruction": "a", "output": "b"}
"""A second source next to each seed, so that a seed without a good row is published too."""

SEED_ENDINGS = {11: (".csv",), 12: (".tsv",)}
SEED_FORMATS = {"seed8.jsonl": "text", "seed13.jsonl": "alpaca"}
"""Extensions and formats for some seeds, besides those of the fuzzer."""

FILES = {
    "glaive": {"path": "glaive_toolcall_en_demo.json", "format": "sharegpt"},
    "tools": {"path": "reason_tool_use_demo_50.jsonl", "format": "chat"},
    "gpt4": {"path": "alpaca_gpt4_eval_1000.jsonl", "format": "alpaca"},
    "zh": {"path": "llamafactory_alpaca_zh_demo.json", "format": "auto"},
    "gsm8k-test": {"path": "gsm8k_test.jsonl", "format": "question_answer"},
    "phrases": {"path": "sst2_dev.tsv", "format": "text", "fields": {"text": "content"}},
    "forged": {"path": "forged.jsonl", "format": "chat"},
    "mapped": {"path": "mapped.jsonl", "format": "auto"},
}
"""Files that no recipe of deployments reads: name -> source of a recipe made here."""

TEMPLATES = {"gpt4": "alpaca", "gsm8k-test": "completion", "phrases": "text"}
"""Template for some of `FILES`; the others use the tokenizer's own."""

SETTINGS = {
    "all": ("glaive", ["format.train_on=all"]),
    "all-but-tools": ("glaive", ["format.train_on=all", "format.never_train=[tool, system]"]),
    "last": ("glaive", ["format.train_on=last_assistant", "split.group_by=record"]),
    "each-turn": ("tools", ["format.turns=alone"]),
    "strip": ("tools", ["format.reasoning=strip"]),
    "think-last": ("tools", ["format.reasoning=train_last"]),
    "windows": ("glaive", ["pack.over_length=window", "pack.seq_len=512"]),
    "cut": ("glaive", ["pack.over_length=truncate_turns", "pack.seq_len=512"]),
    "drop": ("glaive", ["pack.over_length=drop", "pack.seq_len=512", "pack.strategy=next_fit"]),
    "concat": ("phrases", ["pack.strategy=concat", "pack.seq_len=256"]),
    "first-fit": ("gpt4", ["pack.strategy=first_fit", "publish.position_ids=true"]),
    "compact": ("tools", ["publish.layout=compact", "publish.file_format=arrow"]),
    "near": ("zh", ["dedup.near=drop", "dedup.near_threshold=0.5"]),
    "same-side": ("gsm8k-test", ["dedup.near=same_side", "dedup.near_threshold=0.5"]),
    "control-allowed": ("forged", ["tokenize.control_text=allow"]),
    "control-refused": ("forged", ["tokenize.control_text=quarantine"]),
    "alpaca-newline": ("gpt4", ["format.template=alpaca_newline"]),
    "mistral-system": ("tools", ["format.template=mistral_system"]),
    "mistral-bos": ("gpt4", ["format.template={folder}/bos.jinja"]),
}
"""Settings for one of `FILES`, each with Qwen3's tokenizer or, depending on its name, Mistral's."""

BOS_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token + message.role + ': ' + message.content + eos_token }}"
    "{% endfor %}"
)
"""BOS in every turn."""

MAPPED_ROWS = [{"instruction": f"Add {n}.", "input": f"1, {n}", "response": "x"} for n in range(9)]
"""Fields whose meaning `auto` must find."""

ALWAYS = [  # bad rows and odd tokens are compared, so they must not stop a run
    *["validate.max_quarantined=1", "audit.min_answer_coverage=0", "publish.position_ids=false"],
    *(
        f"audit.max_{name}=1"
        for name in (
            *("unterminated_turns", "leaked_headers", "trained_prompts", "untrained_rows"),
            *("untrained_packs", "cut_sequences", "double_bos", "missing_bos", "double_ends"),
            *("unknown_tokens", "duplicates"),
        )
    ),
]

PARTS = {
    "outcome": ("exit", "error", "message"),
    "records": ("source", "row", "record_id", "num_tokens", "outcome", "times", "repeats"),
    "splits": ("source", "row", "record_id", "group_key", "split"),
    "tokens": ("record_id", "input_ids"),
    "labels": ("record_id", "labels", "position_ids", "loss_weights"),
    "packs": ("split", "pack", "record_ids", "others"),
    "quarantine": ("source", "row", "byte_offset", "step", "reason", "raw_sha256", "detail"),
    "ledger": ("what", "counts"),
    "audit": ("what", "counts"),
}
"""Columns of each part; rows of older versions may lack some."""

WORDS = {"error", "message", "detail"}
"""Columns that are kept for reading but not compared."""

Parts = dict[str, list[dict[str, Any]]]


class Combination(NamedTuple):
    """A recipe with a tokenizer."""

    name: str
    recipe: Path
    settings: list[str]


class Workplace:
    """A folder with the inputs, and recipes for inputs without one."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder, self.checkout = folder, checkout
        self.shared = find_shared()
        self.data = folder / "shared" / "data"
        self.data.mkdir(parents=True)
        self.tokenizers = {"demo": checkout / "deployments/demo/tokenizer"}
        if self.shared is not None:
            (folder / "shared" / "tokenizers").symlink_to(self.shared / "tokenizers")
            for path in sorted((self.shared / "data").iterdir()):
                (self.data / path.name).write_bytes(_sample(path))
            folders = filter(Path.is_dir, sorted((self.shared / "tokenizers").iterdir()))
            self.tokenizers |= {path.name.split("-")[0]: path for path in folders}
        rng = random.Random(20261122)
        forged = (forged_conversation(rng, may_instruct=True) for _ in range(NUM_FORGED))
        lines = [json.dumps(_chat(turns)) for turns in forged]
        (self.data / "forged.jsonl").write_text("\n".join(lines) + "\n")
        (self.data / "mapped.jsonl").write_text("\n".join(map(json.dumps, MAPPED_ROWS)))
        (self.data / "sound.jsonl").write_text(json.dumps(SOUND_ROW) + "\n")
        (folder / "bos.jinja").write_text(BOS_TEMPLATE)
        for number, seed in enumerate(SEEDS):
            for ending in (".jsonl", ".json", "", *SEED_ENDINGS.get(number, ())):
                (self.data / f"seed{number}{ending}").write_bytes(seed)

    def inputs(self) -> dict[str, str]:
        """Return the digest of every input file, to detect changed inputs."""
        files = [path for path in self.data.iterdir() if path.name != "PROVENANCE.json"]
        for folder in self.tokenizers.values():
            files += [path for path in folder.iterdir() if path.is_file()]
        named = {f"{path.parent.name}/{path.name}": path for path in sorted(files)}
        return {name: _digest(path.read_bytes()) for name, path in named.items()}

    def combinations(self) -> Iterator[Combination]:
        recipes = {path.stem: path for path in self.checkout.glob("deployments/recipes/*.yaml")}
        recipes = {"demo": self.checkout / "deployments/demo/recipe.yaml", **recipes}
        if self.shared is None:
            recipes = {"demo": recipes["demo"]}
        for tokenizer, folder in self.tokenizers.items():
            given = [f"tokenizer={folder}"]
            for name, path in sorted(recipes.items()):
                yield Combination(f"{name}+{tokenizer}", path, given)
            for name, source in FILES.items():
                if (self.data / source["path"]).exists():
                    template = TEMPLATES.get(name, "chat")
                    yield Combination(f"{name}+{tokenizer}", self.recipe(source, template), given)
            for name, (of, settings) in SETTINGS.items():
                with_tokenizer = "mistral" if name.startswith("mistral") else "qwen3"
                if tokenizer == with_tokenizer:
                    recipe = self.recipe(FILES[of], TEMPLATES.get(of, "chat"))
                    placed = [setting.format(folder=self.folder) for setting in settings]
                    yield Combination(f"{of}-{name}+{tokenizer}", recipe, [*given, *placed])
            if tokenizer == "demo":
                for path in sorted(self.data.glob("seed*")):
                    row_format = SEED_FORMATS.get(path.name, "auto")
                    template = "text" if row_format == "text" else "chat"
                    recipe = self.recipe({"path": path.name, "format": row_format}, template)
                    yield Combination(f"{path.name}+{tokenizer}", recipe, given)

    def recipe(self, source: dict[str, Any], template: str) -> Path:
        path = self.folder / f"{source['path']}.yaml"
        sources = [source]
        if source["path"].startswith("seed"):
            row_format = "text" if template == "text" else "alpaca"
            sources.append({"path": "sound.jsonl", "format": row_format})
        content = {
            "dataset": "oracle",
            "sources": [{**each, "path": str(self.data / each["path"])} for each in sources],
            "tokenizer": "named by the combination",
            "format": {"template": template},
            "pack": {"seq_len": 4096},
            "split": {"eval_fraction": 0.2},
        }
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def make(self, combination: Combination) -> Parts:
        store = self.folder / "stores" / combination.name
        command = [*COMMAND, str(combination.recipe), "--json"]
        command += ["--cache", str(self.folder / "cache")]  # so tokenizers are checked once
        for setting in (*ALWAYS, *combination.settings, f"publish.store={store}"):
            command += ["--set", setting]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACKHOUSE_")}
        environment["PACKHOUSE_SHARED"] = str(self.folder / "shared")
        environment["PYTHONPATH"] = str(self.checkout)
        done = subprocess.run(
            command, cwd=self.checkout, env=environment, capture_output=True, text=True
        )
        if done.returncode == 2 and not done.stdout:  # the command line no longer knows a setting
            raise SystemExit(f"{combination.name}: {done.stderr}")
        result = json.loads(done.stdout) if done.stdout else {"message": done.stderr[-2000:]}
        message = str(result.get("message", "")).replace(str(self.folder), "")
        outcome = {"exit": done.returncode, "error": result.get("error", ""), "message": message}
        return {"outcome": [outcome], **(_read_version(store) if done.returncode == 0 else {})}


def _sample(path: Path) -> bytes:
    num_rows = SAMPLED.get(path.name)
    if num_rows is None:
        return path.read_bytes()
    if path.suffix == ".json":
        rows = json.loads(path.read_bytes())
        return json.dumps(rows[:: len(rows) // num_rows], indent=4).encode()
    lines = path.read_bytes().splitlines(keepends=True)
    head = 1 if path.suffix == ".tsv" else 0
    return b"".join(lines[:head] + lines[head :: len(lines) // num_rows])


def _chat(turns: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _read_version(store: Path) -> Parts:
    (manifest_path,) = store.glob("*/v/*/manifest.json")
    manifest = json.loads(manifest_path.read_bytes())
    ledger = {step["step"]: step for step in manifest["counts"]["ledger"]}
    for step in ledger.values():  # gives the number of rows that the quarantined records come from
        step.pop("quarantined_again", None)
    ledger |= {name: manifest["counts"][name] for name in ("sides", "sources", "split")}
    audit = {name: manifest["audit"][name] for name in ("dataset", "packs", "sources")}
    parts = {
        "ledger": [{"what": k, "counts": json.dumps(v)} for k, v in ledger.items()],
        "audit": [{"what": k, "counts": json.dumps(v)} for k, v in audit.items()],
        **{name: [] for name in ("tokens", "labels", "packs")},
    }
    for name, folder in (("records", "records"), ("splits", "records"), ("quarantine",) * 2):
        rows = [row for path in _files(manifest_path, folder) for row in _rows(path)]
        parts[name] = [{key: row[key] for key in PARTS[name]} for row in rows]
    for path in _files(manifest_path, "data"):
        split = path.name.split("-")[0]
        for row in _rows(path):
            ids, record_ids, lengths = row["input_ids"], row["record_ids"], row["seq_lengths"]
            pack = {"split": split, "pack": len(parts["packs"]), "record_ids": record_ids}
            known = {"input_ids", "record_ids", "seq_lengths", *PARTS["labels"]}
            others = {name: row[name] for name in sorted(row.keys() - known)}
            parts["packs"].append({**pack, "others": json.dumps(others)})
            start = 0
            for record_id, length in zip(record_ids, lengths, strict=True):
                end = start + length
                parts["tokens"].append({"record_id": record_id, "input_ids": ids[start:end]})
                labels = {name: row[name][start:end] for name in PARTS["labels"] if name in row}
                parts["labels"].append({"record_id": record_id, **labels})
                start = end
    return parts


def _files(manifest: Path, folder: str) -> list[Path]:
    return sorted(manifest.parent.glob(f"{folder}/*"))


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    if path.suffix == ".arrow":
        return list(pa.ipc.open_file(path).read_all().to_pylist())
    return list(pq.read_table(path).to_pylist())


def _compared(row: dict[str, Any]) -> str:
    return json.dumps([value for name, value in row.items() if name not in WORDS])


def _digests(parts: Parts) -> dict[str, str]:
    lines = {part: sorted(map(_compared, rows)) for part, rows in parts.items()}
    return {
        part: f"{len(rows)}:{_digest(chr(10).join(rows).encode())}" for part, rows in lines.items()
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record(out: Path, checkout: Path, only: str) -> int:
    """Write the digests of all combinations to `out`, and the rows next to it."""
    state = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=checkout, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace(Path(scratch), checkout)
        known = json.loads(out.read_bytes()) if out.exists() else {"made": {}, "changes": []}
        known |= {"state": state.stdout.strip(), "inputs": place.inputs()}
        for combination, parts in _make_all(place, only):
            known["made"][combination] = _digests(parts)
            folder = out.with_suffix("") / combination
            folder.mkdir(parents=True, exist_ok=True)
            for part, rows in parts.items():
                pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet")
            _write(out, known)
    return 0


def _make_all(place: Workplace, only: str) -> Iterator[tuple[str, Parts]]:
    chosen = [c for c in place.combinations() if only in c.name]
    for number, combination in enumerate(chosen, start=1):
        parts = place.make(combination)
        what = f"exit {parts['outcome'][0]['exit']}, {len(parts.get('records', []))} records"
        print(f"{number}/{len(chosen)} {combination.name}: {what}", file=sys.stderr)
        yield combination.name, parts


def _write(out: Path, known: dict[str, Any]) -> None:
    out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def compare(out: Path, checkout: Path, only: str, why: str | None) -> int:
    """Print the differences from `out`, and return 1 if there are any.

    Args:
        out: digests that `record` wrote.
        checkout: the checkout to compare.
        only: part of the names of combinations to run.
        why: explanation under which the differences are added to `out`, which then expects the
            current digests.
    """
    known = json.loads(out.read_bytes())
    expected = {name: dict(parts) for name, parts in known["made"].items()}
    for change in known["changes"]:
        for name, parts in change["made"].items():
            expected.setdefault(name, {}).update(parts)
    different = {}
    num_made = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace(Path(scratch), checkout)
        for name, digest in place.inputs().items():
            if known["inputs"].get(name, digest) != digest:
                print(f"input {name}: {known['inputs'][name]} -> {digest}")
        for name, parts in _make_all(place, only):
            num_made += 1
            now, before = _digests(parts), expected.get(name, {})
            for part in PARTS:
                if now.get(part, "none") != before.get(part, "none"):
                    different.setdefault(name, {})[part] = now.get(part, "none")
                    print(f"{name}: {part} {before.get(part, 'none')} -> {now.get(part, 'none')}")
    if why is not None and different:
        known["changes"].append({"why": why, "made": different})
        _write(out, known)
        return 0
    print(f"{num_made - len(different)} combinations are as expected, {len(different)} differ")
    if different:
        print(f"rows: python -m tests.oracle compare {out} --show {next(iter(different))}")
    return 1 if different else 0


def show(out: Path, checkout: Path, tables: Path, name: str) -> int:
    """Print the first row that differs in each part of a combination, as recorded and as now."""
    if not (tables / name).is_dir():
        state = json.loads(out.read_bytes())["state"]
        raise SystemExit(
            f"no rows of {name} in {tables}: git worktree add ../{state} {state}, then python -m "
            f"tests.oracle record ../{state}.json --checkout ../{state} --only {name}, and give "
            f"--tables ../{state}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace(Path(scratch), checkout)
        ((_, made),) = [(n, p) for n, p in _make_all(place, name) if n == name]
    differ = False
    for part in PARTS:
        path = tables / name / f"{part}.parquet"
        before = pq.read_table(path).to_pylist() if path.exists() else []
        rows = [sorted(of, key=_compared) for of in (before, made.get(part, []))]
        for was, now in zip_longest(*rows):
            if was is None or now is None or _compared(was) != _compared(now):
                differ = True
                print(f"{part}, {len(rows[0])} rows -> {len(rows[1])}:", *_both(was, now), sep="\n")
                break
    return 1 if differ else 0


def _both(was: dict[str, Any] | None, now: dict[str, Any] | None) -> Iterator[str]:
    for column in was or now or {}:
        old, new = (row and row.get(column) for row in (was, now))
        at = 0
        if isinstance(old, list) and isinstance(new, list):
            pairs = enumerate(zip_longest(old, new))
            at = next((place for place, (a, b) in pairs if a != b), 0)
            old, new = (each[max(at - 5, 0) : at + 15] for each in (old, new))
        mark = f"  {column}" + (f" from {max(at - 5, 0)}" if at else "")
        yield f"{mark}: {old}" if old == new else f"{mark}:\n    {old}\n    {new}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="digests")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="state to run; this one")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="combinations with it in the name"
    )
    parser.add_argument("--show", metavar="COMBINATION", help="compare: its first differing rows")
    parser.add_argument("--tables", type=Path, help="compare: rows of `record`; by default OUT")
    parser.add_argument("--explain", metavar="WHY", help="compare: expect what differs from now on")
    given = parser.parse_args()
    out, checkout = given.out.resolve(), given.checkout.resolve()
    if given.action == "record":
        return record(out, checkout, given.only)
    if given.show:
        return show(out, checkout, given.tables or out.with_suffix(""), given.show)
    return compare(out, checkout, given.only, given.explain)


if __name__ == "__main__":
    sys.exit(main())
