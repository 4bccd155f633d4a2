"""The run configuration: `tree` (typed sections), `loading` (presets, files, `--set`), `resolve` (derived values),
`contract` (what a resume must agree on), `schema` (JSON Schema). May import everything below `config` and pydantic.
"""
