"""The beginning of an application whose handlers leave one line for each effect, for processes that are stopped."""

EFFECTS_APPLICATION = """
import asyncio, os
from trellis import App, Context

app = App()

async def leave_line(word):
    await asyncio.sleep(0.05)
    descriptor = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{word}\\n".encode())
    os.close(descriptor)
    return word
"""
"""Source code. The file is the one that the environment variable EFFECTS names; one write, so that lines never mix."""
