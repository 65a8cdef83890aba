"""Which messages are trained, and how much: one number for each, decided before any rendering.

What a row says of a message (`weight`, `loss_weight`, `train`) goes before `format.train_on`,
whatever the message's role and the template; but roles of `format.never_train` weigh 0, and tool
results weigh more than that only under `train_on: all`. A few numpy passes over all messages.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Float32s, Int64s
from packhouse.recipe import FormatConfig

ROLES = ("system", "user", "assistant", "tool")


def decide_weights(messages: pa.StructArray, starts: Int64s, config: FormatConfig) -> Float32s:
    """Loss weight of each message; 0: not trained.

    Args:
        messages: all messages of all conversations, type MESSAGE.
        starts: where each conversation's begin, shape [num_conversations + 1].
        config: `train_on`, `never_train` and `template` are read.

    Example:
        >>> from packhouse.records.tables import MESSAGE
        >>> turns = [("user", None), ("assistant", 0.5), ("user", 1.0), ("assistant", None)]
        >>> messages = [{"role": role, "content": "", "weight": weight} for role, weight in turns]
        >>> decide_weights(pa.array(messages, MESSAGE), np.array([0, 4]), FormatConfig()).tolist()
        [0.0, 0.5, 1.0, 1.0]
    """
    role = pc.fill_null(pc.index_in(messages.field("role"), value_set=pa.array(ROLES)), 4)
    role = role.to_numpy(zero_copy_only=False)
    if config.train_on == "all" or config.template == "text":
        is_trained = np.ones(len(role), np.bool_)
    else:
        is_trained = np.asarray(role == ROLES.index("assistant"))
        if config.train_on == "last_assistant":
            # Answers [0 1 0 1 | 0 1], starts [0 4 6]: the 1st, 2nd and 3rd of all; the last ones
            # of their rows are the 2nd and the 3rd.
            through = np.cumsum(is_trained)
            total = np.append(0, through)[starts]
            is_trained &= through == np.repeat(total[1:], np.diff(starts))
    weights = is_trained.astype(np.float32)
    given = messages.field("weight")
    if given.null_count < len(given):
        own = given.to_numpy(zero_copy_only=False)  # NaN where null
        weights = np.where(np.isnan(own), weights, own).astype(np.float32)
    never = [ROLES.index(name) for name in config.never_train]
    if config.train_on != "all":
        never.append(ROLES.index("tool"))
    weights[np.isin(role, never)] = 0
    return weights
