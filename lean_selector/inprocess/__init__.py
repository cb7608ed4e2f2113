"""SelectionService with the API of Dynamo 1.6's Python bindings, on this project's selector."""
