"""Raw OpenAI requests: the gateway, POST /route, and the reading of prompts for both."""
