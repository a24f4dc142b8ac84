"""The gateway: one HTTP entrance. It keeps no state of its own, so any replica answers any request."""

from trellis.gateway.app import GatewayOptions, create_app

__all__ = ["GatewayOptions", "create_app"]
