"""One module per way from raw JSON to packed files; each has `run` and nothing in common.

`run(data, tokenizer, seq_len, out)` reads an Alpaca file, writes packs into the folder `out` and
returns `rows`, `tokens`, `packs` and `bytes` of what it wrote.
"""
