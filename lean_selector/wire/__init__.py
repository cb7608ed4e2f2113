"""Codecs: msgspec structs, and typed encoders and decoders; they only validate."""
