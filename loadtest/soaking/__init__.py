"""What `loadtest/soak.py` is made of: the load, the peers, the faults, the watch, the verdict.

Programs of their own: `lanes` (clients that behave), `engine`, `watch` (probe and control). In the
process of the command: `fleet` (who runs), `mischief` (clients and peers that do not behave),
`faults` (what is injected, and when), `preload` (the measured process' clock and names), `verdict`.
"""
