"""When a chat API may be asked again: Retry-After in its forms, and what is left of the x-ratelimit budgets.

All requests of a run share one limit: where one has to wait, none leaves before. Times are in seconds.
"""

import asyncio
import email.utils
import math
import random
import re
import time
from collections.abc import Mapping

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def parse_seconds(text: str) -> float | None:
    """ "1.5", "20ms", "6m0s", "1h2m" → seconds; None for anything else, negative and infinite numbers too."""
    text = text.strip()
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds an answer asks to wait: `retry-after-ms`, else `retry-after` in seconds or as an HTTP date
    (RFC 9110, 10.2.3); None where it says nothing that can be read."""
    milliseconds = parse_seconds(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after", "")
    seconds = parse_seconds(text)
    if seconds is not None:
        return seconds
    try:
        moment = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, moment - (time.time() if now is None else now))


def empty_for(headers: Mapping[str, str], tokens: int) -> float:
    """Return the seconds until the API's own budgets hold another request of `tokens` tokens, 0 where they do, or where
    the answer has no `x-ratelimit-remaining-…` and `x-ratelimit-reset-…`."""
    waits = [0.0]
    for name, needed in (("requests", 1), ("tokens", tokens)):
        left = headers.get(f"x-ratelimit-remaining-{name}", "")
        reset = parse_seconds(headers.get(f"x-ratelimit-reset-{name}", ""))
        if left.isdigit() and int(left) < needed and reset is not None:
            waits.append(reset)
    return max(waits)


class RateLimit:
    """The moment before which nothing leaves, shared by all requests."""

    def __init__(self) -> None:
        self._not_before = 0.0

    def hold(self, seconds: float) -> None:
        """Nothing leaves for so long; a longer hold stands."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def wait(self) -> None:
        """Until it is over, and a little longer, so that not all leave at once."""
        while (left := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(left + random.uniform(0, min(1.0, 0.15 * left)))
