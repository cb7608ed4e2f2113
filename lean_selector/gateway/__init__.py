"""What takes raw OpenAI requests: the gateway, POST /route, and what both know of prompts."""
