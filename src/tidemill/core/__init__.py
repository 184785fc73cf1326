"""Nouns every room shares: errors, ids, digests, configuration, clocks, token log, manifests, and the client protocols
through which rooms see each other. Imports neither torch nor any other room."""
