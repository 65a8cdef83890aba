"""A step is one object: its name, version and libraries, its parameters, its facts, what it does.

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
so another parameter or another step is a change in one file.

The key of a job is the sha256 of what decides the bytes it writes: the keys of its inputs, its
parameters, the version of the step and of its libraries. Hence a changed `seq_len` changes the keys
of pack and of the steps after it, and no key before it.
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
    """What one job of a step is told: a frozen dataclass."""

    def to_json(self) -> dict[str, object]:
        """Return what of it decides the bytes of the step, as plain JSON; it goes into the key.

        Paths, the encoder and the number of workers decide no byte, so they stay out.
        """


P = TypeVar("P", bound=Parameters)
P_co = TypeVar("P_co", covariant=True)
F = TypeVar("F")
G = TypeVar("G")


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Generic[P, F]):
    """One step of the chain; see its file in `packhouse.run.steps`."""

    name: str
    title: str
    """One sentence for people, shown in the Prefect UI."""
    version: str
    """Raised when the step writes other bytes for the same input; a part of every key."""
    libraries: tuple[str, ...]
    """Packages whose version may change the bytes that the step writes; a part of every key."""
    facts: type[F]
    """Dataclass of what a job counts and finds; kept in the receipt, checked when it is read."""
    compute: "Callable[[Work[P], Path], F]"
    """Does a job: reads what earlier steps wrote, writes files into the folder, returns facts."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """File that the step writes -> name of the contract that it is checked against."""
    then: "Callable[[Work[P], Receipt[F]], Receipt[F]] | None" = None
    """Runs after a job was done or found done: what must happen at every run."""

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
            parameters: what else decides its bytes.
            inputs: jobs whose output it reads, and whose keys decide its own.
            label: for people: which shard.
            also_reads: jobs whose output it reads; the keys of `inputs` decide theirs.
            size: bytes that it works on, about.
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
        """Return the receipt of a job that is done, without a look at the files it lists."""
        return workspace.steps.peek(self.name, key, self.read_facts)

    def read_facts(self, facts: Mapping[str, object]) -> F:
        """Parse the facts of a receipt.

        Raises:
            ValueError: a field is missing or has another type, as in a receipt of another release.
        """
        # Strict JSON: "5" is no number, and a list is fine where the class has a tuple.
        adapter = _adapter(cast("Any", self.facts))
        parsed: F = adapter.validate_json(canonical_json(facts), strict=True)
        return parsed

    def write_facts(self, facts: F) -> dict[str, object]:
        """Return facts as plain JSON, as receipts hold them."""
        adapter = _adapter(cast("Any", self.facts))
        written: dict[str, object] = adapter.dump_python(facts, mode="json", by_alias=True)
        return written


@cache
def _adapter(facts: Any) -> TypeAdapter[Any]:
    return TypeAdapter(facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Generic[P_co]):
    """One step of one shard, or of the whole dataset: what a worker is told to do."""

    step: "AnyStep"
    key: str
    parameters: P_co
    parts: Mapping[str, object]
    """What the key was made of, as plain JSON: for `packhouse explain` alone."""
    inputs: tuple[Ref, ...]
    """The jobs whose output it reads."""
    label: str
    size: int = 0
    """Bytes that it works on, about: by this, jobs are put together into tasks."""

    @property
    def ref(self) -> Ref:
        """Name of its step, and its key."""
        return self.step.name, self.key


AnyJob = Job[Any]
AnyStep = Step[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Generic[P_co]):
    """What `compute` is given: the job, and how to find what earlier steps wrote."""

    job: Job[P_co]
    recipe: Recipe
    """For settings outside the key: paths, the encoder, limits. The rest is in `parameters`."""
    workspace: Workspace

    @property
    def parameters(self) -> P_co:
        """Those of the job."""
        return self.job.parameters

    def inputs(self, step: Step[Any, G]) -> list[Receipt[G]]:
        """Return the receipts of the jobs of `step` that this job reads, in its order."""
        receipts = []
        for name, key in self.job.inputs:
            if name == step.name:
                receipt = step.peek(key, self.workspace)
                assert receipt, f"{self.job.ref} was started before {(name, key)} was done"
                receipts.append(receipt)
        return receipts

    def input(self, step: Step[Any, G]) -> Receipt[G]:
        """Return the receipt of the one job of `step` that this job reads."""
        (receipt,) = self.inputs(step)
        return receipt

    def load_tokenizer(self) -> TokenizerSnapshot:
        """Load the tokenizer of the recipe."""
        recipe = self.recipe
        return load_snapshot(recipe.tokenizer, self.workspace.tokenizers, recipe.tokenize.pipeline)


def execute(job: AnyJob, recipe: Recipe, workspace: Workspace) -> AnyReceipt:
    """Do a job, or find it done; its result is durable when this returns.

    The local runners and the Prefect tasks call it, so the bytes are the same either way.

    Raises:
        PackhouseError: nothing of a failed job remains.
        Interrupted: a signal came before it began.
    """
    check_interrupted()
    keep_freed_memory()
    step, work = job.step, Work(job=job, recipe=recipe, workspace=workspace)

    def compute(folder: Path) -> dict[str, object]:
        facts = step.compute(work, folder)
        for name, contract in step.contracts.items():
            if (folder / name).exists():  # no bad rows, no file of them
                workspace.check(contract, read_table(folder / name))
        return step.write_facts(facts)

    receipt = workspace.steps.run(step.name, job.key, compute, step.read_facts)
    return receipt if step.then is None else step.then(work, receipt)
