"""Randomness that every runtime repeats exactly: Philox, named streams, initial weights, the stateless shuffle.
`*_numpy.py` are the vectorised twins of the modules beside them, equal bit for bit.
May import: errors. Standard library only, except the NumPy twins.
"""
