"""The parity contract: `contract` (tolerances), `workload` (what is trained), `runtimes` (who trains it), `checks` (the
rows of the report), `mutants` (known mistakes that must be noticed). May import everything below `training`.
"""
