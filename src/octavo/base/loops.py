"""The event loop that a process runs its sockets on.

Promises: uvloop's where it is installed, which takes a fifth less processor time for each streamed token; the standard
library's elsewhere (there is none for Windows).
Does not know: what runs on it.
"""

import asyncio
from collections.abc import Callable

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop

__all__ = ["new_event_loop"]
