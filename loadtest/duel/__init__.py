"""Selection services under the same load, in turns: what `loadtest/versus.py` is made of.

`targets` starts and measures the services, `prompts` and `engines` make what they are given,
`load` and `client` drive them, `stages` and `index_stages` say which cases there are, `report` and
`drawing` say how it ended.
"""
