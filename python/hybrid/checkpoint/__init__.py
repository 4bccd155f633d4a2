"""Checkpoints: `safetensors` (strict tensor files), `manifest` (checkpoint.json), `store` (save, find, load, retain),
`writer` (saving in the background), `pieces` (of several processes), `archive` (*.hybrid), `diff` (show, verify,
compare), `resume` (may this run go on?). May import everything below `data`, and NumPy.
"""
