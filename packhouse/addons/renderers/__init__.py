"""Renderers in Python: packages that write conversations for models without a Jinja template."""
