"""List, show and fix bad rows: `packhouse quarantine`."""
