"""Common settings of all flows: results, run names and hooks at the end of a run.

When a run starts, a hook cleans up after runs whose process died (`tasks.cleanup`).
At the end of a run, hooks emit events that the run ended or that a version was refused, on which
automations can act (`docs/how-to/notify.md` lists them). They run in the process of the run, after
its final state was reported, or in the worker's process if the run was cancelled or killed. The run
itself announces a published version before it ends (`tasks.chain`).
"""

import logging
import os
import re
from typing import Any

import coolname.data  # the words that Prefect uses to name runs
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.task_runners import ThreadPoolTaskRunner

from packhouse.errors import PackhouseError
from packhouse.system.wording import counted
from tasks.allowed_places import named_recipe
from tasks.cleanup import clean_up, end_parts, end_runs_without_hooks
from tasks.events import announce_end, announce_refused
from tasks.outcomes import tags_with

if logging.getLogger("packhouse").level == logging.NOTSET:
    # PREFECT_LOGGING_EXTRA_LOGGERS gives it Prefect's handlers, and root's level: WARNING.
    logging.getLogger("packhouse").setLevel(logging.INFO)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log an error of packhouse without its traceback, and only where its message is shown.

    A refusal is not a crash: its message says what to do.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, PackhouseError):
        return True
    record.exc_info = record.exc_text = None
    return type(error).__name__ in record.getMessage()  # else it was logged before


for _name in ("prefect.engine", "prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_without_traceback)


# Names that the run forms fill in: `Ergonomic-Sushi` in the new UI, `theta42-kepler-nebula` or
# `upsilon-arae` in the old one. Greek letters that people often use match only with a number: a
# person may have chosen `alpha-test` or `phi-mini`.
_NAME_OF_FORM = re.compile(
    "(Awesome|Rustic|Small|Gorgeous|Fantastic|Sleek|Intelligent|Unbranded|Refined|Licensed|Generic"
    r"|Practical|Ergonomic|Handcrafted|Tasty|Handmade|Incredible)-(?![a-z]).{1,6}"
    r"|((alpha|beta|gamma|delta|lambda|pi|phi)\d{1,3}"
    r"|(epsilon|zeta|eta|theta|iota|kappa|mu|nu|xi|omicron|rho|sigma|tau|upsilon|chi|psi|omega)"
    r"\d{0,3})(-[a-z]+)+"
)


def recipe_run_name() -> str:
    """Name a run by its flow and its dataset, `refresh demo`, unless a person named it."""
    return _run_name(_name_of(runtime.flow_run.parameters.get("recipe")))


def backfill_run_name() -> str:
    """Name a run by its flow and the number of its recipes, unless a person named it."""
    return _run_name(counted(len(runtime.flow_run.parameters["recipes"]), "recipe"))


def store_run_name() -> str:
    """Name a run by its flow and its dataset, `verify demo`, unless a person named it."""
    return _run_name(runtime.flow_run.parameters.get("dataset") or "all")


def _run_name(subject: str) -> str:
    name = str(runtime.flow_run.name)
    return f"{runtime.flow_run.flow_name} {subject}" if is_made_up(name) else name


def is_made_up(name: str) -> bool:
    """Return True if Prefect made up the name of a run. Prefect does not record this.

    Example:
        >>> made_up = ("diligent-loon", "Ergonomic-Sushi", "phi42-kepler-nebula", "upsilon-arae")
        >>> [is_made_up(name) for name in (*made_up, "first-try", "Small-fix", "alpha-test")]
        [True, True, True, True, False, False, False]
    """
    lists: Any = coolname.data.config.values()
    words = {word for each in lists for word in each.get("words", ())}
    parts = name.split("-")  # Prefect's server: an adjective and an animal
    return (len(parts) == 2 and words.issuperset(parts)) or bool(_NAME_OF_FORM.fullmatch(name))


def _name_of(recipe: Any) -> str:
    name = recipe.get("dataset") if isinstance(recipe, dict) else getattr(recipe, "dataset", recipe)
    return str(name)


def _on_failure(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    error = state.result(raise_on_failure=False)
    if isinstance(error, PackhouseError) and (dataset := _dataset_of(flow_run)):
        announce_refused(dataset, error)


def _tag_outcome(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Tag a failed, crashed or cancelled run with its state, even if it ended early."""
    dataset = _dataset_of(flow_run) or flow_run.parameters.get("dataset")
    # The hook of a cancelled run is called while the run is still Cancelling.
    outcome = "cancelled" if state.is_cancelling() else str(state.name).lower()
    with get_client(sync_client=True) as client:
        tags = tags_with(client.read_flow_run(flow_run.id).tags, outcome=outcome)
        flow_run.tags = sorted({*tags, *([f"dataset:{dataset}"] if dataset else [])})
        client.update_flow_run(flow_run.id, tags=flow_run.tags)


def _dataset_of(flow_run: FlowRun) -> str | None:
    """Return the dataset of a run, since listeners do not know the name of the recipe."""
    recipe = flow_run.parameters.get("recipe")
    if isinstance(recipe, str):
        try:
            return named_recipe(recipe).dataset
        except PackhouseError:
            return recipe  # unknown recipe, so no dataset
    return None if recipe is None else _name_of(recipe)


FLOW: dict[str, Any] = {
    # One thread per core: each has a shard in memory, and Prefect's default is unlimited.
    "task_runner": ThreadPoolTaskRunner(max_workers=os.cpu_count() or 1),
    "persist_result": False,
    "result_serializer": "json",  # for exceptions; the default is a pickle
    "on_running": [end_runs_without_hooks],
    "on_completion": [announce_end],
    "on_failure": [_tag_outcome, _on_failure, announce_end],
    "on_crashed": [_tag_outcome, end_parts, announce_end],
    "on_cancellation": [_tag_outcome, clean_up, announce_end],
}
"""Arguments of every `@flow`."""
