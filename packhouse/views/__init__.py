"""A version as tables that questions are asked of: records, packs, quarantine, dropped, ..."""

from packhouse.views.query import ask

__all__ = ["ask"]
