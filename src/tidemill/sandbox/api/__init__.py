"""HTTP over the orchestrator: bytes to checked values, values to bytes, errors to statuses. No sandbox logic here."""
