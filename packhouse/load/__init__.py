"""Load versions for training, as mapped datasets or streams, and collate their rows.

Import these names from `packhouse`. Only the torch datasets and the collators need torch.
"""
