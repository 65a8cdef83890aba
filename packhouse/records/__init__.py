"""Conversations as columns: Arrow schemas, messages, names by content, and the account of rows."""
