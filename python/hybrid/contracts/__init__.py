"""What every runtime promises: stable JSON and hashes, loss scaler, telemetry, progress, metrics entries, provenance,
fingerprints. `docs/contracts.md` is the prose, `bridge/vectors/` holds the golden values.
May import: errors. Standard library only.
"""
