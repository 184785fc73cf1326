"""Serving core: tokens in, tokens out. `EmbeddedEngine` runs it in a thread, `SpawnedEngine` in a process; both are
`core.engine_api.EngineClient`. The HTTP server is in `tidemill.engine.server`."""

from tidemill.engine.client import EmbeddedEngine
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.load import EngineSpec, load_core
from tidemill.engine.process import SpawnedEngine

__all__ = ["EmbeddedEngine", "EngineConfig", "EngineCore", "EngineSpec", "SpawnedEngine", "load_core"]
