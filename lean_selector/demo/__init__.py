"""`lean-selector demo`: the service, simulated engines and live traffic, watched in a terminal."""
