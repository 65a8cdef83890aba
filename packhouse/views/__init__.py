"""A version as tables that questions are asked of: records, packs, quarantine, dropped, ..."""

from packhouse.views.query import ask, read_view

__all__ = ["ask", "read_view"]
