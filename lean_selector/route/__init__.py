"""The door for gateways: a raw OpenAI request in, the headers of its worker out."""
