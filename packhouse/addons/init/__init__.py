"""`packhouse init`: detect the contents of files and propose source settings to read them."""
