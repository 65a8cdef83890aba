"""Pages and pictures of data for people: a version, an audit, samples with their masks."""
