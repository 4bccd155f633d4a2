"""Models as plain functions of (ops, parameters, inputs, config), written once for every backend.

May import: the standard library, errors, contracts, random, ops, graph.
"""
