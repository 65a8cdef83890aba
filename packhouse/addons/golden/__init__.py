"""Conversations whose outcome a recipe pins, checked in every run."""
