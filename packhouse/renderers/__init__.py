"""Renderers in Python: the engine that finds the row's texts in what they write, and two of them.

`python.py` renders with any of them, those of plug-ins too; `packhouse.templates` imports it when a
recipe names one. `harmony.py` and `mistral.py` ship with packhouse, each for a library that an
extra installs. They have the interface of plug-ins (docs/plugins.md): the class is given the
tokenizer's folder.
"""
