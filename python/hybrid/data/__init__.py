"""From text to batches: `tokenizers`, `store` (the token store), `corpus`, `windows` (samples through the stateless shuffle),
`loader` (batches with prefetch). May import everything below `data`, NumPy and the `tokenizers` library.
"""
