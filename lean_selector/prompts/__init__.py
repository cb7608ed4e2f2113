"""From a raw OpenAI request to the blocks of its prompt: what every door shares."""
