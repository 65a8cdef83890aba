"""`packhouse quarantine`: bad rows listed, shown, mended and read again."""
