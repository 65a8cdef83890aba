"""What DuckDB may not do, wherever packhouse runs it: reach files or the network, or load code."""

NO_FILES = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Else what memory does not hold goes to `.tmp` in the working directory, up to 90% of the disk.
    "max_temp_directory_size": "0B",
}
"""Settings of a connection; each use adds its own memory and threads."""
