"""The kernel catalogue: for every WGSL kernel its bindings, uniforms, constants and launch size.

One module per file of `shaders/`.
"""
