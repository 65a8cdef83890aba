"""`packhouse export VERSION... DEST --to FORMAT`: versions in the format of a trainer."""

import json
from pathlib import Path

import click

from packhouse.addons.exports.writing import FORMATS, export_version
from packhouse.cli.options import cache_option, json_option
from packhouse.errors import ConfigError
from packhouse.store.read import open_address
from packhouse.system.terminal import echo


@click.command()
@click.argument("addresses", metavar="ROOT/DATASET[@NAME]...", nargs=-1, required=True)
@click.argument("dest", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "export_format",
    required=True,
    metavar="FORMAT",  # no `Choice`: `export_version` says why there is no such format
    help=f"One of {', '.join(FORMATS)}.",
)
@click.option("--split", "splits", multiple=True, help="Only this split; may be repeated.")
@click.option("--shards", default=1, type=click.IntRange(1), help="Files of each split.")
@cache_option("Folder of verified copies.")
@json_option()
def export(
    addresses: tuple[str, ...],
    dest: Path,
    export_format: str,
    splits: tuple[str, ...],
    shards: int,
    cache: Path,
    as_json: bool,
) -> None:
    """Write a version in the format of a trainer, with the label shift its reader expects.

    Of several versions, each gets a folder of its dataset's name in DEST.

    \b
    packhouse export ./store/alpaca out --to trl
    packhouse export s3://bucket/store/alpaca@prod out --to megatron --split train --shards 8
    packhouse export ./store/alpaca ./store/chats out --to trl   # out/alpaca, out/chats

    trl: TRL and transformers. axolotl: pre-tokenized records. megatron: Megatron-Bridge packed
    Parquet. mds: MosaicML Streaming. msgpack, jsonl: small collate tools. arrow:
    Dataset.from_file.
    """
    opened = [open_address(address) for address in addresses]
    folders = [dest / each.dataset if len(opened) > 1 else dest for each in opened]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise ConfigError(f"'{folder}' would hold two versions. Export them in two calls")
    exports = [
        export_version(each, export_format, folder, splits=splits, num_shards=shards, cache=cache)
        for each, folder in zip(opened, folders, strict=True)
    ]
    if as_json:
        facts = [
            {
                "dataset": exported.dataset,
                "version": exported.version,
                "format": exported.export_format,
                "folder": str(exported.folder),
                "splits": exported.splits,
                "files": exported.files,
            }
            for exported in exports
        ]
        echo(json.dumps(facts if len(facts) > 1 else facts[0], sort_keys=True))
        return
    for exported in exports:
        echo(f"{exported.dataset} {exported.version} as {exported.export_format}:")
        for name in exported.files:
            echo(f"  {exported.folder / name}")
