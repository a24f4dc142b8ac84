"""The gateway: the one HTTP API of an instance. It keeps no state of its own, so any replica can answer any request."""

from trellis.gateway.app import GatewayOptions, create_app

__all__ = ["GatewayOptions", "create_app"]
