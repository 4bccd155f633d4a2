"""From a graph to a plan: `kernels` (the WGSL catalogue), `programs` (which graphs a run needs), `lowering`, `memory`,
`document` (the versioned JSON), `compiler`. May import: errors, contracts, random, ops, graph, models, objectives,
optim. Standard library only.
"""
