"""What a trainer reads: versions as mapped datasets or streams, and collators of their rows.

Users import its names from `packhouse`. Needs no torch but for datasets of torch and collators.
"""
