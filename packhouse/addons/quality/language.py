"""The language of texts, by py3langid: naive Bayes over byte n-grams, made for this and small.

It is an extra (`packhouse[quality]`), numpy alone, and gives the same answer for a text whatever
stands around it. It knows 139 languages; told apart are 59 of them, since with all of them short
English is often taken for a creole, and Mandarin for Wu. 150 us a text.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from packhouse.errors import ConfigError
from packhouse.system.plugins import import_extra

UNDETERMINED = "und"

_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk"
    " kn ko la lt lv mk ml mn mr nl no pa pl pt ro ru sk sl sq sr sv sw ta te th tr uk ur vi zh"
).split()
_MIN_CHARACTERS = 20
_MAX_CHARACTERS = 400  # of the middle of a text: more does not make it surer
_MIN_PROBABILITY = 0.7


def language(text: pa.StringArray) -> pa.StringArray:
    """ISO 639-1 code of a text's language, such as `en`; `und` where it is short or mixed.

    Raises:
        ConfigError: py3langid is not installed.
    """
    return pa.array([None if each is None else _language(each) for each in text.to_pylist()])


def language_key(languages: Sequence[str]) -> dict[str, object]:
    """Return what decides which answers are in another language, for a step's key; empty without.

    Raises:
        ConfigError: py3langid is not installed, or a language is none that it is asked for.
    """
    if not languages:
        return {}
    for name in languages:
        if name not in _LANGUAGES:
            raise ConfigError(
                f"audit.quality.languages: '{name}' is none of {', '.join(_LANGUAGES)}", name=name
            )
    _import()
    detector = ["py3langid", version("py3langid")]
    return {"languages": sorted(set(languages)), "language_detector": detector}


def _language(text: str) -> str:
    text = text.strip()
    if len(text) < _MIN_CHARACTERS:
        return UNDETERMINED
    start = max(0, (len(text) - _MAX_CHARACTERS) // 2)
    name, probability = _identifier().classify(text[start : start + _MAX_CHARACTERS])
    return str(name) if probability >= _MIN_PROBABILITY else UNDETERMINED


def _import() -> Any:
    return import_extra("py3langid.langid", "quality", "the language of texts")


@cache
def _identifier() -> Any:
    langid = _import()
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    identifier.set_languages(_LANGUAGES)
    return identifier
