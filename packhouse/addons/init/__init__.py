"""What files hold, and the settings of a source that reads them right; for `packhouse init`."""

from packhouse.addons.init.files import Look, look_at, look_at_file

__all__ = ["Look", "look_at", "look_at_file"]
