"""What packhouse knows of a tokenizer, read once and then independent of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from packhouse.recipe.rows import PipelineChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSnapshot:
    """A tokenizer as plain data: what decides ids, and what templates may ask for."""

    fingerprint: str
    """sha256 over the tokenizer's files and the versions of the libraries that read it."""

    class_name: str
    """Class that `AutoTokenizer` chose. It can change ids, so it belongs to the identity."""

    backend: str
    """The whole pipeline as JSON, loadable by `tokenizers` alone: `backend_tokenizer.to_str()`."""

    vocab_size: int
    """Ids are in [0, vocab_size), added tokens included."""

    added_tokens: Mapping[str, int]
    """Text of every added token (control tokens, `<think>`, ...) to its id."""

    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, `pad_token`, `unk_token`, `cls_token`, `sep_token` -> its text."""

    adds_bos: bool
    """True if encoding with special tokens puts BOS (or CLS) first."""

    chat_template: str | None
    """Jinja source of the default chat template, if any."""

    pipeline: PipelineChoice = "class"
    """Whose pipeline `backend` is: the class's, or that of tokenizer.json alone."""

    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of every token that stops generation -> the file that says so: first those of
    `generation_config.json`, in its order, then the tokenizer's EOS (`tokenizer`)."""

    def __post_init__(self) -> None:
        """Add the EOS, which stops generation wherever nothing else does."""
        eos = self.special_tokens.get("eos_token")
        if eos is not None and eos not in self.stop_tokens:
            object.__setattr__(self, "stop_tokens", {**self.stop_tokens, eos: "tokenizer"})
