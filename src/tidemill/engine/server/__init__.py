"""OpenAI's HTTP API in front of any EngineClient. Bodies become messages and ids here and nowhere deeper."""

from tidemill.engine.server.app import ServerLimits, create_app

__all__ = ["ServerLimits", "create_app"]
