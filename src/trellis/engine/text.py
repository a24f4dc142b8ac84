"""Text that comes from handlers and people, made fit to be stored."""


def storable(text: str | None) -> str | None:
    """Without what a database refuses: errors of handlers may hold NUL characters and halves of surrogate pairs."""
    if text is None:
        return None
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
