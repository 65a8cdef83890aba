"""A version as tables that questions are asked of: records, packs, quarantine, dropped, ..."""

from packhouse.views.query import ask, find_records, read

__all__ = ["ask", "find_records", "read"]
