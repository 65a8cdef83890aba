"""Variants of a tokenizer that differ in its added tokens only.

They share the model of the loaded tokenizer, so that one is made in milliseconds.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson

from packhouse.arrays import Bools, Int32s, Int64s
from packhouse.tokenization.encoders import load_tokenizer
from packhouse.tokenization.memo import memo
from packhouse.tokenization.pipeline import AddedToken, Pipeline, read_pipeline

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@memo
def token_finder(backend: str) -> tuple["Tokenizer", dict[int, AddedToken]]:
    """A tokenizer without a vocabulary: it finds added tokens as HF does, and nothing else."""
    from tokenizers import Tokenizer, models

    full = load_tokenizer(backend)
    finder = Tokenizer(models.BPE())
    if full.normalizer is not None:
        finder.normalizer = full.normalizer
    _add_tokens(finder, full, {})
    added = read_pipeline(backend).added
    return finder, {_id_of(finder, token.text): token for token in added}


def _add_tokens(to: "Tokenizer", full: "Tokenizer", names: dict[int, str]) -> None:
    """Add the added tokens of `full`, with their flags, some of them under other names."""
    from tokenizers import AddedToken

    to.add_tokens(
        [
            AddedToken(
                names.get(index, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for index, token in sorted(full.get_added_tokens_decoder().items())
        ]
    )


def _id_of(tokenizer: "Tokenizer", text: str) -> int:
    index = tokenizer.token_to_id(text)
    assert index is not None, f"{text!r} was not added"
    return index


@dataclass(frozen=True, slots=True, eq=False)
class RenamedTokenizer:
    """The tokenizer with other names for its control tokens."""

    tokenizer: "Tokenizer"
    to_id: Int32s
    """Its ids -> ours. Names are not in the vocabulary, so that they get ids above it."""

    is_name: Bools
    """True where an id is that of such a name."""

    def forges(self, ids: Int64s, pipeline: Pipeline) -> bool:
        """Return True if plain text became a control token other than the unknown token."""
        plain = self.to_id[ids[~self.is_name[ids]]]
        return any(index != pipeline.unk_id for index in plain[pipeline.is_control[plain]])


def rename_controls(backend: str, names: dict[int, str]) -> RenamedTokenizer:
    """Make a tokenizer that knows control tokens by other names only.

    Args:
        backend: the pipeline.
        names: id of each control token -> its name, which no text may hold.
    """
    return _rename(backend, _base_tokenizer(backend), names)


def _rename(backend: str, base: "Tokenizer", names: dict[int, str]) -> RenamedTokenizer:
    """Build a tokenizer with other names from the parts of `base`, whose model it shares."""
    from tokenizers import Tokenizer

    pipeline = read_pipeline(backend)
    tokenizer = Tokenizer(base.model)
    if base.normalizer is not None:
        tokenizer.normalizer = base.normalizer
    if base.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = base.pre_tokenizer
    # New ids count on from the number of entries: where ids have gaps, fill up to the last one.
    gaps = pipeline.model_size - tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_tokens([f"\ue000{number}\ue000" for number in range(gaps)])
    _add_tokens(tokenizer, load_tokenizer(backend), names)
    new_ids = {
        _id_of(tokenizer, names.get(token.id, token.text)): token.id for token in pipeline.added
    }
    # A vocabulary of 5 ids with the control token 2, which is called otherwise now, at id 5:
    # to_id [0 1 2 3 4 2], is_name [0 0 0 0 0 1].
    to_id = np.arange(max(pipeline.model_size, *(new + 1 for new in new_ids)), dtype=np.int32)
    to_id[list(new_ids)] = list(new_ids.values())
    is_name = np.zeros(len(to_id), np.bool_)
    is_name[[new for new, index in new_ids.items() if index in names]] = True
    assert not is_name[: pipeline.model_size].any(), "a name took an id of the vocabulary"
    return RenamedTokenizer(tokenizer, to_id, is_name)


@memo
def _base_tokenizer(backend: str) -> "Tokenizer":
    """The tokenizer whose model gives no control token for plain text.

    That is the tokenizer itself, unless its model reaches such an entry of its vocabulary without
    an added token (Unigram does): then the entry gets another name there too.
    """
    from tokenizers import Tokenizer

    pipeline = read_pipeline(backend)
    full = load_tokenizer(backend)
    controls = [token for token in pipeline.added if token.is_control]
    renamed = _rename(backend, full, {token.id: f"z{token.id}y" for token in controls})
    probes = [form.format(t.text) for t in controls for form in ("{}", "a{}a", " {} ")]
    encodings = renamed.tokenizer.encode_batch(probes, add_special_tokens=False)
    ids = np.array([index for encoding in encodings for index in encoding.ids], np.int64)
    if not renamed.forges(ids, pipeline):
        return full
    return Tokenizer.from_str(_hide_controls(backend, {token.text for token in controls}))


def _hide_controls(backend: str, controls: set[str]) -> str:
    """Rename vocabulary entries, and drop the merges that lead to them."""
    parsed = orjson.loads(backend)
    model = parsed["model"]
    hidden = {text: f"\ue000{text}\ue000" for text in controls}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(text, text): id_ for text, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if not {pair[0], pair[1], "".join(pair)} & controls
        ]
    parsed["added_tokens"] = []
    parsed["post_processor"] = None
    return orjson.dumps(parsed).decode()
