"""Codecs: msgspec structs with typed encoders and decoders, which check shapes and ranges only."""
