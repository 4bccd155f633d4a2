"""From text to batches: `corpus` (documents), `tokenizers`, `store` (the token store), `windows` and `packing`
(samples), `loader` (batches in shuffled order), `prepare` (all of it from a configuration). May import everything
below `data`, NumPy and the `tokenizers` library.
"""
