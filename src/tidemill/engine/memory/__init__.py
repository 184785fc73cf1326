"""Memory of the engine: limits, releasable arenas, state slots, pages, and which sequence holds what."""
