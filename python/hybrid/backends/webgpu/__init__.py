"""The WebGPU backend: `device` (adapter, limits, features), `executor` (runs a plan's programs), `session` (trains with
them), `variants` (times kernel variants once per adapter). May import everything below `backends` and wgpu.
"""
