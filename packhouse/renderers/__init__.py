"""Renderers in Python that packhouse ships, each for a library that an extra installs.

They have the interface of plug-ins (docs/plugins.md): the class is given the tokenizer's folder.
"""
