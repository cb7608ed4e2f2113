"""The API as an OpenAPI document, made of the route tables and of the structs that travel."""
