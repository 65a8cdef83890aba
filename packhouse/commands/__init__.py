"""The subcommands of `packhouse`, one file each; `packhouse.cli` finds them."""
