"""Backends run training sessions: `reference` (NumPy runs the graph), `webgpu` (wgpu-py runs the plan), `torch`.
`protocol` says what every session can do. May import everything below `backends`; each optional package only in its
folder.
"""
