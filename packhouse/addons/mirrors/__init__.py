"""Copies elsewhere: of finished steps in an object store, of versions on the Hub and in W&B."""
