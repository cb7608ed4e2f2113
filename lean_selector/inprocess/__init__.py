"""SelectionService as in Dynamo 1.6's Python bindings, backed by this project's selector."""
