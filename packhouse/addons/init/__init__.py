"""`packhouse init`: what files hold, and the settings of a source that reads them right."""
