"""`packhouse export`, and `publish.exports`: versions in the formats of trainers."""
