"""What the log remembers between two lines."""

import msgspec


class Shedding(msgspec.Struct):
    shed: int  # requests, when last looked at
    since: int | None = None  # how many they were before; None while nothing is shed


class Bucket(msgspec.Struct):
    lines: float  # that may still be written
    at: float
    suppressed: int = 0
