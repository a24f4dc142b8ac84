"""What Kubernetes puts into the environment of every pod of a namespace for each Service there."""


def service_variables(service: str, *, address: str = "10.0.0.7", port: int = 8420) -> dict[str, str]:
    """The variables for a Service of this name, in capitals and with underscores, with one port named `http`."""
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:{port}"
    return {
        f"{service}_SERVICE_HOST": address,
        f"{service}_SERVICE_PORT": str(port),
        f"{service}_SERVICE_PORT_HTTP": str(port),
        f"{service}_PORT": url,
        f"{service}_PORT_{port}_TCP": url,
        f"{service}_PORT_{port}_TCP_PROTO": "tcp",
        f"{service}_PORT_{port}_TCP_PORT": str(port),
        f"{service}_PORT_{port}_TCP_ADDR": address,
    }


SERVICES = ("TRELLIS", "TRELLIS_GATEWAY", "TRELLIS_NLM", "TRELLIS_SAFETY", "TRELLIS_LEDGER")
"""Services whose variables begin like settings; three of them have the name of a setting for a port."""
INJECTED = {name: value for service in SERVICES for name, value in service_variables(service).items()}
