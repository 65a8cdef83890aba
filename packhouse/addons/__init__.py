"""Add-ons: features that the rest works without; `packhouse/registry.py` names them."""
