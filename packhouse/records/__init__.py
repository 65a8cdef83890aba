"""Conversations as columns: Arrow schemas, messages, content ids, and the ledger of rows."""
