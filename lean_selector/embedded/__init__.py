"""The selector as a library: SelectionService, with the API of Dynamo 1.6's Python bindings."""
