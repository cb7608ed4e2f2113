"""Raw OpenAI requests: the gateway, POST /route, and how both read prompts."""
