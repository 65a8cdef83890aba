"""The steps of the chain, in the order in which data passes through them: one object in one file.

`packhouse.run.step` says what a step is. Up to tokenize a job is a shard of input, and for
gather and files a part of the output; pack and split look at the whole dataset.
"""

from packhouse.run.step import AnyStep
from packhouse.run.steps.publish import ALL_LIBRARIES, ENGINE_VERSIONS, PUBLISH, STEPS_BEFORE

__all__ = ["ALL_LIBRARIES", "ENGINE_VERSIONS", "STEPS"]

STEPS: tuple[AnyStep, ...] = (*STEPS_BEFORE, PUBLISH)
