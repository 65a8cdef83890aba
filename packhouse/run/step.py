"""Define steps and jobs: one `Step` object holds a step's name, version, libraries and function.

    TOKENIZE = Step(
        name="tokenize",
        version="1.2",
        libraries=("numpy", "pyarrow"),
        facts=TokenizeFacts,
        compute=compute,
        contracts={"tokenized.arrow": "tokenized"},
    )
    job = TOKENIZE.job(Parameters(...), inputs=[formatted.ref], label="a.jsonl")
    execute(job, recipe, workspace).facts.tokens_out

The planner, the cache, `packhouse explain`, the ledger and the Prefect tasks all read this object,
so adding a parameter or a step changes one file.

The key of a job is the sha256 of everything that determines its output: the keys of its inputs, its
parameters, and the versions of the step and its libraries. A changed `seq_len` changes the keys
of pack and of later steps, but none before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic import TypeAdapter

from packhouse.recipe import Recipe
from packhouse.records.tables import read_table
from packhouse.run.cache import AnyReceipt, Receipt, Workspace
from packhouse.system.fingerprint import canonical_json, digest, library_versions
from packhouse.system.terminal import check_interrupted
from packhouse.system.worker import keep_freed_memory
from packhouse.tokenize import TokenizerSnapshot, load_snapshot

Ref = tuple[str, str]
"""Name of the step and key of a job."""


class Parameters(Protocol):
    """Parameters of one job, a frozen dataclass."""

    def to_json(self) -> dict[str, object]:
        """Return the parameters that determine the output, as plain JSON for the key.

        Paths, the encoder and the number of workers do not change the output, so they are left out.
        """


P = TypeVar("P", bound=Parameters)
P_co = TypeVar("P_co", covariant=True)
F = TypeVar("F")
G = TypeVar("G")


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Generic[P, F]):
    """One step of the chain. Each is defined in its own file in `packhouse.run.steps`."""

    name: str
    title: str
    """One sentence that the Prefect UI shows."""
    version: str
    """Raise it when the step writes different bytes for the same input. Part of every key."""
    libraries: tuple[str, ...]
    """Packages whose version may change the step's output. Part of every key."""
    facts: type[F]
    """Dataclass of a job's counts and findings; stored in the receipt, validated when read."""
    compute: "Callable[[Work[P], Path], F]"
    """Runs a job: reads the output of earlier steps, writes files to the folder, returns facts."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """Output file -> name of the contract that it must satisfy."""
    then: "Callable[[Work[P], Receipt[F]], Receipt[F]] | None" = None
    """Called after each job, cached or not, for work that every run must repeat."""

    def job(
        self,
        parameters: P,
        inputs: Sequence[Ref],
        *,
        label: str = "all records",
        also_reads: Sequence[Ref] = (),
        size: int = 0,
    ) -> "Job[P]":
        """Return a job with its key.

        Args:
            parameters: parameters of the job.
            inputs: jobs whose output it reads; their keys go into its key.
            label: name shown to users, such as the shard.
            also_reads: other jobs whose output it reads; the keys of `inputs` already cover them.
            size: approximate input size in bytes.
        """
        parts = {
            "step": self.name,
            "engine": self.version,
            "inputs": [key for _, key in inputs],
            "libraries": library_versions(self.libraries),
            **parameters.to_json(),
        }
        return Job(
            step=self,
            key=digest(parts),
            parameters=parameters,
            parts=parts,
            inputs=tuple(chain(inputs, also_reads)),
            label=label,
            size=size,
        )

    def peek(self, key: str, workspace: Workspace) -> Receipt[F] | None:
        """Return the receipt of a finished job without reading the files it lists."""
        return workspace.steps.peek(self.name, key, self.read_facts)

    def read_facts(self, facts: Mapping[str, object]) -> F:
        """Parse the facts of a receipt.

        Raises:
            ValueError: a field is missing or has the wrong type, as in a receipt from another
                release.
        """
        # Strict JSON rejects "5" for 5, but still accepts a list for a tuple.
        adapter = _adapter(cast("Any", self.facts))
        parsed: F = adapter.validate_json(canonical_json(facts), strict=True)
        return parsed

    def write_facts(self, facts: F) -> dict[str, object]:
        """Return facts as plain JSON for the receipt."""
        adapter = _adapter(cast("Any", self.facts))
        written: dict[str, object] = adapter.dump_python(facts, mode="json", by_alias=True)
        return written


@cache
def _adapter(facts: Any) -> TypeAdapter[Any]:
    return TypeAdapter(facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Generic[P_co]):
    """One step applied to one shard or to the whole dataset: the unit of work."""

    step: "AnyStep"
    key: str
    parameters: P_co
    parts: Mapping[str, object]
    """Everything that went into the key, as plain JSON. Only `packhouse explain` reads it."""
    inputs: tuple[Ref, ...]
    """The jobs whose output it reads."""
    label: str
    size: int = 0
    """Approximate input size in bytes, used to group jobs into tasks."""

    @property
    def ref(self) -> Ref:
        """Step name and key."""
        return self.step.name, self.key


AnyJob = Job[Any]
AnyStep = Step[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Generic[P_co]):
    """Context passed to `compute`: the job and access to the output of earlier steps."""

    job: Job[P_co]
    recipe: Recipe
    """Read it only for settings outside the key: paths, the encoder, limits."""
    workspace: Workspace

    @property
    def parameters(self) -> P_co:
        """Parameters of the job."""
        return self.job.parameters

    def inputs(self, step: Step[Any, G]) -> list[Receipt[G]]:
        """Return the receipts of this job's inputs from `step`, in the order of its inputs."""
        receipts = []
        for name, key in self.job.inputs:
            if name == step.name:
                receipt = step.peek(key, self.workspace)
                assert receipt, f"{self.job.ref} was started before {(name, key)} was done"
                receipts.append(receipt)
        return receipts

    def input(self, step: Step[Any, G]) -> Receipt[G]:
        """Return the receipt of this job's only input from `step`."""
        (receipt,) = self.inputs(step)
        return receipt

    def load_tokenizer(self) -> TokenizerSnapshot:
        """Load the recipe's tokenizer."""
        recipe = self.recipe
        return load_snapshot(recipe.tokenizer, self.workspace.tokenizers, recipe.tokenize.pipeline)


def execute(job: AnyJob, recipe: Recipe, workspace: Workspace) -> AnyReceipt:
    """Run a job unless the cache has it; its output is on disk when this returns.

    The local runners and the Prefect tasks both call this, so they write the same bytes.

    Raises:
        PackhouseError: the job failed; none of its files remain.
        Interrupted: a signal arrived before the job began.
    """
    check_interrupted()
    keep_freed_memory()
    step, work = job.step, Work(job=job, recipe=recipe, workspace=workspace)

    def compute(folder: Path) -> dict[str, object]:
        facts = step.compute(work, folder)
        for name, contract in step.contracts.items():
            if (folder / name).exists():  # a quarantine file exists only if there are bad rows
                workspace.check(contract, read_table(folder / name))
        return step.write_facts(facts)

    receipt = workspace.steps.run(step.name, job.key, compute, step.read_facts)
    return receipt if step.then is None else step.then(work, receipt)
