"""Codecs of HTTP bodies, KV events and replica messages: msgspec structs that check ranges too."""
