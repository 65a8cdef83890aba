"""Reports as pages and pictures: of a version or a recipe, with samples and their masks."""
