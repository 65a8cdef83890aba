"""One module per way from raw JSON to packed files. Each has `run`, and they share nothing else.

`run(data, tokenizer, seq_len, out)` reads an Alpaca file, writes packs into the folder `out` and
returns `rows`, `tokens`, `packs` and `bytes` of the output.
"""
