"""packhouse: raw instruction data in, versions of training-ready, packed token data out."""
