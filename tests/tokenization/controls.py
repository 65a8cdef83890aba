"""Ids of control tokens for tests."""

import numpy as np

from packhouse.tokenize import TokenizerSnapshot
from packhouse.tokenize.encoders import read_pipeline


def control_ids(snapshot: TokenizerSnapshot) -> set[int]:
    """Ids that control a model and that contents must not forge: `<|im_end|>`, `[INST]`."""
    return set(np.flatnonzero(read_pipeline(snapshot.backend).is_control).tolist())
