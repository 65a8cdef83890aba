"""Render validated conversations to text with trained spans.

`make_renderer` picks the template of a recipe: constants around contents (`alpaca`,
`alpaca_newline`, `completion`, `classification`, `sequence_classification`, `text`, `dart-math/qa`
...), the tokenizer's own chat template (`chat`), `mistral_system`, a Jinja file, or a renderer in
Python (`harmony`, `mistral`, a plug-in's name). A row that the template cannot render, or renders
without all of its text, goes to quarantine. A template whose trained spans cannot be proven is
refused as a whole.
"""

from importlib import resources
from pathlib import Path

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.recipe.settings import TEMPLATES, is_renderer
from packhouse.registry import function_of_addon
from packhouse.render.chat import ChatEngine
from packhouse.render.renderer import Rendered, Renderer, WindowRule
from packhouse.render.rows import RowRenderer
from packhouse.render.sandbox import pinned_date
from packhouse.render.single_turn import SINGLE_TURN, make_single_turn
from packhouse.system.plugins import find_plugin, pip_install
from packhouse.tokenize.encoders import TokenizerSnapshot, TokenLimit, ends_of

__all__ = ["VERSION", "Rendered", "Renderer", "WindowRule", "make_renderer"]

VERSION = 3
"""Version of rendering. Raise it when the text, spans or counts of any rows change."""

MAX_ENGINES = 8
_ENGINES: dict[str, ChatEngine] = {}
"""Facts about chat templates, kept because a process renders many shards with the same one."""


def make_renderer(
    config: FormatConfig,
    snapshot: TokenizerSnapshot,
    label_names: list[str] | None = None,
    window: WindowRule | None = None,
    folder: Path | None = None,
    limit: TokenLimit | None = None,
) -> Renderer:
    """Return the renderer of `config.template`.

    Cheap for templates: a chat template is compiled and probed at the first `render`. A renderer in
    Python is imported, which may take seconds.

    Args:
        config: the recipe's format section.
        snapshot: tokenizer whose control tokens and chat template are used.
        label_names: text of label 0, 1, ..., which `classification` trains.
        window: rule for windows, if over-long conversations are split.
        folder: folder of the tokenizer, for renderers in Python that read its files.
        limit: for long rows with many answers: records over it are only counted.

    Raises:
        ConfigError: the template is unknown, a Jinja file cannot be read, or the prompt is invalid.
        TemplateError: the tokenizer lacks something that the template needs (EOS, a chat template).
    """
    name = config.template
    if name in SINGLE_TURN:
        return Renderer(make_single_turn(config, snapshot, label_names), config, window)
    plugin = find_plugin("renderers", name) if is_renderer(name) else None
    source, where = _chat_source(name, snapshot, folder) if plugin is None else ("", str(plugin))
    tokens = snapshot.special_tokens, snapshot.added_tokens, snapshot.stop_tokens
    # Only templates that write the date are compiled again when it changes.
    today = pinned_date() if "strftime_now" in source else None
    # Everything that decides what the engine renders, or which rows it refuses.
    key = repr(
        (
            config.model_dump_json(),
            where,
            source,
            snapshot.fingerprint,
            tokens,
            today,
            limit and limit.max_tokens,
        )
    )
    if key not in _ENGINES:
        while len(_ENGINES) >= MAX_ENGINES:
            _ENGINES.pop(next(iter(_ENGINES)), None)
        if plugin is None:
            rows = RowRenderer(config, snapshot, source, where)
        else:
            rows = function_of_addon("make_rows")(plugin, config, snapshot, folder)
        _ENGINES[key] = ChatEngine(rows, config, limit)
    return Renderer(_ENGINES[key], config, window)


def _chat_source(
    name: str, snapshot: TokenizerSnapshot, folder: Path | None = None
) -> tuple[str, str]:
    """Return the Jinja source and its name for errors; the tokenizer's `folder` is for advice."""
    if name.endswith((".jinja", ".j2")):
        try:
            return Path(name).read_text(encoding="utf-8"), f"template '{name}'"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"format.template '{name}' cannot be read: {error}") from None
    if name == "mistral_system":
        source = resources.files(__name__).joinpath("mistral_system.jinja")
        return source.read_text(encoding="utf-8"), f"template '{name}'"
    if name.startswith("dart-math/") and name in TEMPLATES:
        write = function_of_addon("dart_math_template")
        return write(name, ends_of(snapshot, "")), f"template '{name}'"
    if name != "chat":
        known = ", ".join(TEMPLATES)
        raise ConfigError(f"unknown template '{name}'. Known: {known}, or a .jinja or .j2 file")
    if not snapshot.chat_template:
        other = "alpaca, completion or text, or to a Jinja file"
        if folder is not None and (folder / "tekken.json").is_file():
            other = f"mistral, which supports tekken.json ({pip_install('mistral')})"
        raise TemplateError(
            f"the tokenizer ({snapshot.class_name}) has no chat template. Set format.template to"
            f" {other}"
        )
    return snapshot.chat_template, "the tokenizer's chat template"
