"""Raw OpenAI requests: the gateway, POST /route, and the prompt reader that both use."""
