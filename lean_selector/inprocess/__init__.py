"""The class of Dynamo 1.6's Python bindings, over this project's selector."""
