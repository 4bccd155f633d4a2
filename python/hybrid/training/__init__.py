"""The training loop: `runner` (the loop and nothing else), what it leans on (`start`, `sessions`, `resume`,
`entries`, `evaluation`, `signals`, `run_files`), and what shows it (`view`, `live`, `plot`). May import everything
below `training`, and rich.
"""
