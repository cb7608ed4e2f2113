"""Codecs: msgspec structs and typed encoders and decoders; no behaviour beyond validation."""
