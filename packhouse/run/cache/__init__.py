"""The cache of finished steps: losing it costs time, never data.

steps.py    a folder per step and key, its receipt written last
holds.py    steps that runs hold, which are never removed
limits.py   what lies there, what may go, and the limits that runs keep by themselves
mirrors.py  finished steps in an object store, for machines without a common disk
"""
