"""List the steps of the chain in order; each is one object in its own file.

`packhouse.run.step` defines what a step is. A job processes one shard of input through tokenize,
one part of the output in gather and files, and the whole dataset in pack and split.
"""

from packhouse.run.step import AnyStep
from packhouse.run.steps.publish import ALL_LIBRARIES, ENGINE_VERSIONS, PUBLISH, STEPS_BEFORE

__all__ = ["ALL_LIBRARIES", "ENGINE_VERSIONS", "STEPS"]

STEPS: tuple[AnyStep, ...] = (*STEPS_BEFORE, PUBLISH)
