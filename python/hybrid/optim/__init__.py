"""The optimizer: settings, parameter groups, schedules as tables, the update rule. One kernel per backend applies them.
May import: errors, contracts, random, ops, graph. Standard library only.
"""
