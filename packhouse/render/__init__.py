"""Render validated conversations to text with trained spans.

`make_renderer` picks the template of a recipe: constants around contents (`alpaca`,
`alpaca_newline`, `completion`, `classification`, `sequence_classification`, `text`, `dart-math/qa`
...), the tokenizer's own chat template (`chat`), `mistral_system`, a Jinja file, or a renderer in
Python (`harmony`, `mistral`, a plug-in's name). A row that the template cannot render, or renders
without all of its text, goes to quarantine. A template whose trained spans cannot be proven is
refused as a whole.
"""

from packhouse.render.renderer import VERSION, Rendered, Renderer, WindowRule, make_renderer

__all__ = ["VERSION", "Rendered", "Renderer", "WindowRule", "make_renderer"]
