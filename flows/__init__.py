"""Flows: each file holds one @flow and reads as the sentence of what it does."""
