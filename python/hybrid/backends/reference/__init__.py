"""The reference backend: NumPy runs the graph. It defines every primitive readably, is the oracle of the kernel
tests, and trains on machines without a GPU. May import: everything below `backends`, and `backends`' own shared
modules.
"""
