"""The client's edge: an HTTP server with deadlines, caps and strict framing, that stops in the right order."""

from proxy.server.cycle import DISCONNECT, WRITE, App, ServerLimits, Shutdown
from proxy.server.process import Server, run, serve

__all__ = ["DISCONNECT", "WRITE", "App", "Server", "ServerLimits", "Shutdown", "run", "serve"]
