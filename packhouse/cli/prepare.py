"""`packhouse prepare`: raw data to a published version, in this process, without any server."""

import click

from packhouse.cli import exit_interrupted
from packhouse.cli.options import json_option, run_options, set_option
from packhouse.errors import ConfigError
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, print_note


@click.command()
@click.argument("data", metavar="RECIPE | DATA...", nargs=-1, required=True)
@click.option("--tokenizer", help="Folder, or name on the Hub: org/name[@revision].")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens of a pack. [default: 2048]")
@click.option("--store", metavar="PLACE", help="Folder or s3://bucket/prefix. [default: ./store]")
@click.option("--dataset", metavar="NAME", help="Name in the store. [default: the first file's]")
@set_option("Any key of a recipe: --set split.eval_fraction=0.02. May be repeated.")
@click.option(
    "--move-ref",
    is_flag=True,
    help="Move `latest` although --set, --tokenizer or --seq-len changed the RECIPE.",
)
@run_options
@json_option("Print the result as one line of JSON.")
def prepare(
    data: tuple[str, ...],
    tokenizer: str | None,
    seq_len: int | None,
    store: str | None,
    dataset: str | None,
    overrides: tuple[str, ...],
    move_ref: bool,
    cache: str | None,
    workers: int,
    as_json: bool,
) -> None:
    """Prepare raw instruction data, and publish it as a version of packed token data.

    DATA are files, folders, globs, addresses (s3://, gs://, az://, hf://); or a RECIPE (.yaml).

    \b
    validate -> format -> tokenize -> pack -> split -> publish

    Steps that are done already are found in the cache and not done again. Nothing becomes visible
    in the store unless every step succeeded.

    A RECIPE that is changed by --set, --tokenizer or --seq-len is published, and `latest` stays at
    its version, for others may read it; --move-ref moves it.

    \b
    Exit codes:
    0   published or unchanged
    2   the recipe or an option is wrong
    3   a source or the tokenizer cannot be read, or nothing is left
    4   refused: too many bad rows, a contract or an audit limit broken
    5   the store or a disk
    6   network or storage hiccups
    7   published, but the ref was held back by drift
    130 stopped by Ctrl-C; 143 by SIGTERM

    \b
    packhouse prepare talks.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
    packhouse prepare alpaca.json --tokenizer ./llama --set format.template=alpaca
    packhouse prepare recipe.yaml --set pack.seq_len=8192
    """
    try:
        with show_progress():
            start_phase("importing")
            from packhouse.api import prepare_recipe  # takes over a second
            from packhouse.run.given import recipe_for
            from packhouse.system.disks import check_cache, find_cache

            is_recipe = data[0].endswith((".yaml", ".yml"))
            if is_recipe and len(data) > 1:
                raise ConfigError(f"'{data[0]}' is a recipe; give it alone, or DATA without it")
            if move_ref:
                overrides = (*overrides, "publish.move_ref=true")
            place = find_cache(cache)
            recipe = recipe_for(
                data[0] if is_recipe else list(data),
                tokenizer=tokenizer,
                seq_len=seq_len,
                store=store,
                dataset=dataset,
                cache=check_cache(place.folder),
                settings={},
                overrides=overrides,
            )
            prepared, notes = prepare_recipe(
                recipe, place, workers, file=data[0] if is_recipe else None
            )
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=True)
    from packhouse.cli.summary import print_result

    for note in notes:
        print_note(f"note: {note}")
    print_result(prepared, as_json=as_json)
