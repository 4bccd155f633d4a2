"""The graph: what a traced model becomes. `ir` (values and nodes), `tracer` (records `ops` calls), `autodiff` (one VJP
rule per op). May import: errors, contracts, random, ops. Standard library only.
"""
