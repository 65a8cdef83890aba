"""`packhouse prepare`: raw data to a published version, in this process, without any server."""

import click

from packhouse.cli import exit_interrupted, json_option, number_option, run_options, set_option
from packhouse.errors import ConfigError
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, print_note


@click.command()
@click.argument("data", metavar="RECIPE | DATA...", nargs=-1, required=True)
@click.option("--tokenizer", help="Tokenizer folder, or Hub name: org/name[@revision].")
@number_option("--seq-len", "Pack size in tokens. [default: 2048]", least=1)
@click.option(
    "--store",
    metavar="PATH|URI",
    help="Store to publish to: a folder or s3://bucket/prefix. [default: ./store]",
)
@click.option(
    "--dataset",
    metavar="NAME",
    help="Name of the dataset in the store. [default: name of the first file]",
)
@set_option("Set a recipe value: --set split.eval_fraction=0.02. May be repeated.")
@click.option(
    "--move-ref",
    is_flag=True,
    help="Move `latest` even if --set, --tokenizer or --seq-len overrides the recipe.",
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
    workers: int | None,
    as_json: bool,
) -> None:
    """Prepare instruction data and publish it as a version of packed tokens.

    Pass a RECIPE (.yaml), or DATA: files, folders, globs or URIs (s3://, gs://, az://, hf://).
    Finished steps are read from the cache, and nothing is published unless every step succeeds.
    If --set, --tokenizer or --seq-len overrides a RECIPE, `latest` does not move unless you pass
    --move-ref.

    \b
    Example:
      $ packhouse prepare chats.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
      published chats 0bc8b616aa87002e.g0
        in ./store/chats@0bc8b616aa87002e.g0#f676..., ref 'latest'
      ...

    \b
    Exit codes:
      0    published or unchanged
      2    invalid recipe or option
      3    a source or the tokenizer cannot be read, or no rows are left
      4    rejected: too many bad rows, an exceeded audit limit, or invalid output
      5    a store or disk error
      6    a temporary network or storage error
      7    published, but the ref did not move: the version drifted too far
      130  stopped by Ctrl-C (143: by SIGTERM)
    """
    try:
        with show_progress():
            start_phase("importing")
            from packhouse.system.worker import hide_pandas

            # Before pyarrow makes its first list: it imports pandas for that, which took 0.28 of
            # 1.05 s.
            hide_pandas()
            from packhouse.run.chain import prepare_recipe  # takes over a second
            from packhouse.run.prepare_arguments import recipe_for
            from packhouse.system.disks import check_cache, find_cache

            is_recipe = data[0].endswith((".yaml", ".yml"))
            if is_recipe and len(data) > 1:
                raise ConfigError(
                    f"'{data[0]}' is a recipe and cannot be combined with other arguments. Pass "
                    "only the recipe, or only data."
                )
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
            file = data[0] if is_recipe else None
            prepared, notes = prepare_recipe(recipe, place, workers, file=file)
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=True)
    from packhouse.cli.result_summary import print_result

    for note in notes:
        print_note(f"note: {note}")
    print_result(prepared, as_json=as_json)
