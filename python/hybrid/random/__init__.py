"""Randomness that every runtime repeats: Philox, named streams, initial weights, the stateless shuffle, latent noise.
`*_numpy.py` are the vectorised twins of the modules beside them, equal bit for bit (the noise: to float32's last).
May import: errors. Standard library only, except the NumPy twins.
"""
