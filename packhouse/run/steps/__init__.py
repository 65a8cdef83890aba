"""List the steps of the chain in order; each is one object in its own file.

`packhouse.run.step` defines what a step is. A job processes one shard of input through tokenize,
the whole dataset in pack and split, and one file of the output in files.
"""

from packhouse.run.step import AnyStep
from packhouse.run.steps.publish import PUBLISH, STEPS_BEFORE

STEPS: tuple[AnyStep, ...] = (*STEPS_BEFORE, PUBLISH)
