"""What a model is trained for: heads that turn final hidden states into losses, written once for every backend.

May import: the standard library, errors, contracts, random, ops, graph, models.
"""
