"""What travels: msgspec structs and typed codecs; no behaviour beyond validation."""
