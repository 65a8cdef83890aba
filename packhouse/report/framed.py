"""A whole page inside a notebook's cell, where its scripts reach nothing of the notebook."""

from dataclasses import dataclass
from html import escape

__all__ = ["FramedPage"]


@dataclass(frozen=True, slots=True)
class FramedPage:
    """A page that a notebook shows in a frame of its own."""

    html: str
    height: int = 900
    """Pixels."""

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="packhouse report" sandbox="allow-scripts" style="width:100%;'
            f'height:{self.height}px;border:0" srcdoc="{escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<a page of {len(self.html):,} characters, which a notebook shows>"
